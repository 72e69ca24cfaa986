"""Builds on an S3 server that fails, and workers that die while they talk to it."""

import signal
from unittest.mock import patch

import pytest

from semix.data.root import Root
from semix.data.store import Store
from semix.data.store.services import RetryPolicy
from semix.data.verify import damage
from semix.pipeline.bake import bake_shard, open_baked
from semix.pipeline.relabel import ensure_set_prototypes, label_stored, plan_set, relabelled_config
from semix.pipeline.root import build_of
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
    for shard in labels.done():
        bake_shard(shard, source=root, labels=labels, target=target, plan=plan)
    assert target.missing() == []
    assert damage(target, full=True) == []
    return contents(target)


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
