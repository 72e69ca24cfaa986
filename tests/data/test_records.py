import json
import logging
from pathlib import Path

import pytest

from data.records import Records, record_name
from data.root import Root
from data.shards import shard_name
from tests.data.whole_roots import Counting, commit_record, empty_root
from tests.handmade import PLAN_DIGEST

MANY = 3000


@pytest.fixture
def root(tmp_path):
    return empty_root(tmp_path)


def put_record(root, shard, **changes):
    record = {**commit_record(shard), **changes}
    root.store.put(record_name(shard), json.dumps(record).encode())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Three folders full of commit records, without their tars."""
    root = empty_root(tmp_path_factory.mktemp("large"), shards=MANY + 5)
    for shard in range(MANY):
        if shard % 1000 == 0:
            root.store.put(record_name(shard), b"{}")  # makes the folder
        Path(root.url, record_name(shard)).write_text(json.dumps(commit_record(shard)))
    return root


def test_every_record_is_read_once_however_often_one_looks(large):
    store = Counting(large.store)
    records = Records(store, PLAN_DIGEST)
    assert len(records.committed()) == MANY
    assert store.calls == {"list": 2, "facts": 1, "get": MANY}
    store.calls.clear()
    assert len(records.committed()) == MANY
    assert store.calls == {"list": 1, "facts": 1}


def test_an_index_stands_for_the_records_that_it_knows(large):
    large.write_index()
    store = Counting(large.store)
    records = Records(store, PLAN_DIGEST)
    assert list(records.committed().items()) == list(large.committed().items())
    assert store.calls == {"list": 2, "facts": 1, "get": 1}  # the index alone
    put_record(large, MANY)
    put_record(large, 7, tar=f"{shard_name(7)}-ba7816bf.tar", worker="rewritten: another size")
    store.calls.clear()
    assert len(Records(store, PLAN_DIGEST).committed()) == MANY + 1
    assert store.calls["get"] == 3


def test_what_an_index_keeps_is_what_progress_needs(root):
    root.commit(commit_record(0))
    before = root.progress()
    root.write_index()
    again = Root(root.url)
    entry = again.committed()[0]
    assert again.progress() == before
    assert (entry["first"], entry["wall_seconds"]) == (0, 2.0)
    pinned = json.loads(root.store.get("index/0.json"))
    assert pinned["shards"][0]["tar"] == commit_record(0)["tar"]


def test_a_damaged_index_is_passed_over_with_a_warning(root, caplog):
    root.commit(commit_record(0))
    root.write_index()
    root.store.put("index/1.json", b'{"plan": "x", "sha')
    with caplog.at_level(logging.WARNING):
        logging.getLogger("semix").propagate = True
        store = Counting(root.store)
        assert list(Records(store, PLAN_DIGEST).committed()) == [0]
    assert "index/1.json: index: " in caplog.text
    assert store.calls["get"] == 2  # the damaged one, then the one before it; no record


def test_an_index_of_another_plan_is_passed_over(root):
    other = {**json.loads(root.store.get("plan.json")), "plan": "e" * 64}
    root.store.create("index/0.json", json.dumps({"plan": other["plan"], "shards": []}).encode())
    root.commit(commit_record(1))
    assert list(Root(root.url).committed()) == [1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"shard": 1, "sp', "commit record: "),
        (b"\xff\xfe\x00", "commit record: "),
        (json.dumps(commit_record(2)).encode(), "is the record of shard 2"),
        (json.dumps(commit_record(1, plan="e" * 64)).encode(), "belongs to another plan"),
        (json.dumps({**commit_record(1), "tar": "../../etc/passwd"}).encode(), "commit record: "),
    ],
)
def test_a_damaged_or_foreign_record_counts_as_missing(root, content, reason):
    root.commit(commit_record(0))
    root.store.put(record_name(1), content)
    records = Records(root.store, PLAN_DIGEST)
    assert list(records.committed()) == [0]
    assert records.find(1) is None
    assert records.damaged[record_name(1)].startswith(reason)
    put_record(root, 1)  # mended by someone else, while we look
    assert list(records.committed()) == [0, 1]
    assert records.damaged == {}


def test_a_discarded_record_never_counts_again_whatever_an_index_says(root):
    for shard in (0, 1):
        root.commit(commit_record(shard))
    root.write_index()
    watching = Root(root.url)
    assert list(watching.committed()) == [0, 1]
    root.discard(0, why="a flipped bit")
    assert list(watching.committed()) == [1]
    assert root.commit({**commit_record(0), "worker": "second"})
    for look in (watching, Root(root.url)):
        assert list(look.committed()) == [0, 1]
        assert look.record(0)["worker"] == "second"
        assert look.committed()[0]["discards"] == 1
    note = json.loads(root.store.get("discarded/0000/0000000.1.json"))
    assert (note["why"], json.loads(note["record"])["tar"]) == (
        "a flipped bit",
        commit_record(0)["tar"],
    )


def test_a_kill_between_tombstone_and_removal_leaves_the_shard_missing(root, monkeypatch):
    root.commit(commit_record(0))
    root.write_index()

    def killed(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(root.store, "delete", killed)
    with pytest.raises(KeyboardInterrupt):
        root.discard(0)
    again = Root(root.url)
    assert again.store.exists(record_name(0))
    assert again.missing() == [0, 1, 2]
    assert not again.is_committed(0)
    assert again.commit({**commit_record(0), "worker": "second"})
    assert Root(root.url).missing() == [1, 2]
