"""Builds on an S3 server that fails, and workers that die while they talk to it."""

import signal
from hashlib import sha256
from unittest.mock import patch

import pytest

from semix.data.formats import PROTOTYPES
from semix.data.index import open_index
from semix.data.root import Root
from semix.data.store import Store
from semix.data.store.services import RetryPolicy
from semix.data.verify import damage
from semix.pipeline.bake import bake_shard, open_baked
from semix.pipeline.plan import build_of
from semix.pipeline.relabel import ensure_set_prototypes, label_stored, plan_set, relabelled_config
from semix.pipeline.worker import main as worker
from tests.integration.conftest import contents
from tests.integration.crashes import die, in_child
from tests.pipeline.roots import plan_of

STEPS = ("publish", "put", "create")  # how a shard's files reach the store, in this order


def test_a_fifth_of_all_requests_fail(tiny, unbroken, bucket, faulty_s3):
    root = tiny.start(f"{bucket}/mixed")
    faulty_s3.fail(errors=0.1, lost=0.05, cut_answers=0.03, cut_requests=0.02)
    finished = tiny.finish(root)
    assert contents(finished) == unbroken
    assert damage(finished, full=True) == []
    assert sum(faulty_s3.done.values()) >= 5


def test_labels_are_made_and_baked_while_a_fifth_of_all_requests_fail(
    tiny, bucket, faulty_s3, tmp_path
):
    quiet = relabel_and_bake(
        tiny.finish(tiny.start(str(tmp_path / "mixed"))), str(tmp_path / "baked")
    )
    root = tiny.finish(tiny.start(f"{bucket}/mixed"))
    faulty_s3.fail(errors=0.1, lost=0.05, cut_answers=0.03, cut_requests=0.02)
    assert relabel_and_bake(root, f"{bucket}/baked") == quiet
    assert sum(faulty_s3.done.values()) >= 5


def relabel_and_bake(root: Root, url: str) -> dict[str, object]:
    """Relabel a root and bake it into `url`; returns the contents of the baked root."""
    config = relabelled_config(root, ["annotation.rule=similarity"])
    labels = plan_set(root, config)
    ensure_set_prototypes(labels, device="cpu")
    label_stored(labels, labels.missing(), plan=build_of(labels.root).plan)
    target, plan = open_baked(root, config, labels, url), plan_of(root)
    digest = sha256(target.store.get(PROTOTYPES)).hexdigest()
    for shard in labels.done():
        bake_shard(shard, source=root, labels=labels, target=target, plan=plan, prototypes=digest)
    assert target.missing() == []
    assert damage(target, full=True) == []
    return contents(target)


def test_a_listing_that_is_late_costs_double_work_at_most(tiny, unbroken, bucket, faulty_s3):
    root = tiny.start(f"{bucket}/mixed")
    tiny.make(root, 0)
    assert Root(root.url).write_index() == "index/0.json"
    faulty_s3.fail(late="")
    tiny.make(root, 1)
    assert Root(root.url).missing() == [1, 2]  # shard 1 is there, and not yet listed
    finished = tiny.finish(root)
    name = Root(root.url).write_index()
    assert [entry.shard for entry in open_index(root.store, name).shards] == [0]
    faulty_s3.heal()
    assert contents(finished) == unbroken
    assert damage(Root(root.url), full=True) == []
    pinned = open_index(root.store, Root(root.url).write_index()).shards
    assert [entry.shard for entry in pinned] == [0, 1, 2]


def test_what_a_late_listing_still_shows_is_in_no_index(tiny, bucket, faulty_s3):
    root = tiny.finish(tiny.start(f"{bucket}/mixed"))
    assert root.done() == [0, 1, 2]
    faulty_s3.fail(late="")
    root.discard(1, why="damaged")
    assert root.done() == [0, 1, 2]
    pinned = open_index(root.store, root.write_index()).shards
    assert [entry.shard for entry in pinned] == [0, 2]
    faulty_s3.heal()
    assert root.missing() == [1]


def test_files_that_are_listed_later_than_their_record_are_not_missing(tiny, bucket, faulty_s3):
    root = tiny.start(f"{bucket}/mixed")
    faulty_s3.fail(late=".tar")
    tiny.finish(root)
    assert damage(Root(root.url)) == []
    assert len(open_index(root.store, root.write_index()).shards) == 3


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_around_a_request(tiny, unbroken, bucket, step, after):
    root = tiny.start(f"{bucket}/mixed")
    tiny.make(root, 0)
    original = getattr(Store, step)

    def dying(*arguments, **options):
        if not after:
            die()
        original(*arguments, **options)
        die()

    def work() -> None:
        with patch.object(Store, step, dying):
            tiny.make(Root(root.url), 1)

    assert in_child(work) == -signal.SIGKILL
    reopened = Root(root.url)
    assert 0 in reopened.done()
    assert damage(reopened, full=True) == []
    assert contents(tiny.finish(reopened)).items() >= unbroken.items()


@pytest.mark.parametrize(
    ("fault", "status", "told"),
    [
        ({"statuses": [503]}, 75, "the store or a file fails, asking for a new process: "),
        ({"statuses": [403], "code": "ExpiredToken"}, 78, "credentials "),
    ],
)
def test_a_store_that_fails_while_a_shard_is_published_is_told_by_the_status(
    tiny, unbroken, bucket, faulty_s3, monkeypatch, capsys, fault, status, told
):
    hasty = RetryPolicy(seconds=2.0, attempts=1, connect_s=1.0, answer_s=5.0)
    monkeypatch.setattr("semix.data.store.services.DEFAULT_RETRIES", hasty)
    monkeypatch.setattr("semix.pipeline.shard.load_models", lambda *_, **__: tiny.models)
    root, publish = tiny.start(f"{bucket}/mixed"), Store.publish

    def failing(self, partial, name):
        if "/0000001-" in name:
            faulty_s3.fail(errors=1.0, **fault)
        publish(self, partial, name)

    with patch.object(Store, "publish", failing):
        assert worker([root.url, "--device", "cpu", "--shards", "0-1"]) == status
    output = capsys.readouterr()
    assert told in output.err.splitlines()[-1]
    assert output.out.startswith("shard 0: ")
    faulty_s3.heal()
    assert Root(root.url).done() == [0]
    assert contents(tiny.finish(root)) == unbroken


def test_a_bucket_that_turns_read_only_stops_the_build_and_loses_nothing(
    tiny, unbroken, bucket, faulty_s3
):
    root = tiny.start(f"{bucket}/mixed")
    tiny.make(root, 0)
    faulty_s3.fail(read_only=True)
    with pytest.raises(PermissionError):
        tiny.make(root, 1)
    assert Root(root.url).done() == [0]
    faulty_s3.heal()
    assert contents(tiny.finish(root)) == unbroken
