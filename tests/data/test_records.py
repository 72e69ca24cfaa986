"""Commit records, failed attempts and tombstones: which count, and what a refresh costs."""

import json
import logging
from pathlib import Path

import pytest

from semix.data.formats import CommitRecord, attempt_name, record_name
from semix.data.index import open_index
from semix.data.records import Attempts, Records
from semix.data.root import Root
from semix.data.store import Store
from tests.data.whole_roots import Counting, commit_record, empty_root, failure
from tests.handmade import PLAN_DIGEST

MANY = 3000


@pytest.fixture
def root(tmp_path):
    return empty_root(tmp_path)


def put_record(root, shard, **changes):
    root.store.put(record_name(shard), commit_record(shard, **changes).written())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Three folders full of commit records, without their tars, and an empty one."""
    root = empty_root(tmp_path_factory.mktemp("large"), shards=MANY + 5)
    for shard in range(MANY):
        if shard % 1000 == 0:
            root.store.put(record_name(shard), b"{}")  # makes the folder
        Path(root.url, record_name(shard)).write_bytes(commit_record(shard).written())
    Path(root.url, record_name(MANY)).parent.mkdir()  # of the shards that are missing
    return root


def records_of(store, shards=MANY + 5):
    return Records(store, PLAN_DIGEST, shards=shards)


def numbers(records: Records) -> list[int]:
    return records.rows().numbers.tolist()


def test_every_record_is_read_once_and_full_folders_are_not_listed_again(large):
    store = Counting(large.store)
    records = records_of(store)
    records.refresh()
    assert (len(records.rows()), records.missing()) == (MANY, list(range(MANY, MANY + 5)))
    # Two listings of folders (shards, tombstones), one of each of four folders, one of indices.
    assert store.calls == {"scan": 2 + 4 + 1, "get": MANY}
    store.calls.clear()
    records.refresh()
    assert len(records.rows()) == MANY
    assert store.calls == {"scan": 2 + 1}  # the folder that is not full
    put_record(large, MANY)
    records.refresh()
    assert records.missing() == list(range(MANY + 1, MANY + 5))
    assert store.calls == {"scan": 3 + 3, "get": 1}
    large.store.delete(record_name(MANY))


def test_a_look_tells_of_each_folder_that_it_has_read(large):
    heartbeats = []
    root = Root(large.url, heartbeat=lambda: heartbeats.append(1))
    root.missing()
    assert len(heartbeats) == 4
    root.missing()
    assert len(heartbeats) == 5  # the folder that is not full


def test_only_the_folders_that_are_asked_for_are_looked_at(large):
    store = Counting(large.store)
    records = records_of(store)
    records.refresh(1200, 1900)
    assert records.missing(1200, 1900) == []
    assert store.calls["get"] == 1000
    assert Root(large.url).missing(2500, 10**6) == list(range(MANY, MANY + 5))


def test_an_index_stands_for_the_records_that_it_knows(large):
    large.write_index()
    store = Counting(large.store)
    records = records_of(store)
    records.refresh()
    assert len(records.rows()) == MANY
    assert store.calls == {"scan": 2 + 4 + 1, "get": 1}
    assert list(records.rows()) == list(large.committed().values())
    put_record(large, MANY)
    put_record(large, 7, worker="rewritten: another size")
    store.calls.clear()
    reread = records_of(store)
    reread.refresh()
    assert len(reread.rows()) == MANY + 1
    assert store.calls["get"] == 1 + 2  # the index, and what is new
    for shard in (7, MANY):
        put_record(large, shard)
    large.store.delete(record_name(MANY))


def test_what_an_index_keeps_is_what_progress_needs(root):
    root.commit(commit_record(0, groups=1, left_out=[{"group": 1, "reason": "flat"}]))
    before = root.progress()
    assert (before.left_out, before.groups_done) == (1, 1)
    root.write_index()
    reopened = Root(root.url)
    entry = reopened.committed()[0]
    assert reopened.progress() == before
    assert (entry.first, entry.wall_seconds, entry.group_numbers) == (0, 2.0, [0])
    (pinned,) = open_index(root.store, "index/0.json").shards()
    assert pinned == entry


def test_a_damaged_index_is_passed_over_with_a_warning(root, caplog):
    root.commit(commit_record(0))
    root.write_index()
    root.store.put("index/1.json", b'{"plan": "x", "sha')
    with caplog.at_level(logging.WARNING):
        store = Counting(root.store)
        records = records_of(store)
        records.refresh()
        assert numbers(records) == [0]
    assert "index/1.json: index: " in caplog.text
    assert store.calls["get"] == 2  # the damaged one, then the one before it; no record


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "commit record: "),
        (b'{"shard": 1, "sp', "commit record: "),
        (b"\xff\xfe\x00", "commit record: "),
        (commit_record(1).written()[:-1] + b',"x":' + b"[" * 99_999, "commit record: "),
        (b" " * (CommitRecord.MAX_BYTES + 1), "has 1048577 bytes, far too many"),
        (commit_record(2).written(), "is the record of shard 2"),
        (commit_record(1, plan="e" * 64).written(), "belongs to another plan"),
        (commit_record(1, discards=1).written(), "was discarded and is still there"),
        (commit_record(1).written().replace(b".tar", b".gz"), "commit record: tar is not"),
        (
            commit_record(1, attempt=9**9).written().replace(b"387420489", b"9" * 30),
            "commit record: ",
        ),
        (commit_record(1).written().replace(b":3", b":%d" % 2**63), "commit record: "),
    ],
    ids=range(11),
)
def test_a_damaged_or_foreign_record_counts_as_missing(root, content, reason):
    root.commit(commit_record(0))
    root.store.put(record_name(1), content)
    records = records_of(root.store, shards=3)
    records.refresh()
    assert (numbers(records), records.missing()) == ([0], [1, 2])
    assert records.find(1) is None
    (rejected,) = records.folders()[0].rejected.items()
    assert rejected[0] == 1 and rejected[1][1].startswith(reason)
    put_record(root, 1)  # repaired by another process in the meantime
    records.refresh()
    assert numbers(records) == [0, 1]
    assert records.folders()[0].rejected == {}


def test_a_discarded_record_never_counts_again_whatever_an_index_says(root):
    for shard in (0, 1):
        root.commit(commit_record(shard))
    root.write_index()
    opened_before = Root(root.url)
    assert opened_before.done() == list(opened_before.committed()) == [0, 1]
    root.discard(0, why="a flipped bit")
    assert opened_before.done() == list(opened_before.committed()) == [1]
    assert opened_before.progress().groups_done == 2
    assert root.commit(commit_record(0, worker="second"))
    for reader in (opened_before, Root(root.url)):
        assert reader.done() == list(reader.committed()) == [0, 1]
        assert reader.progress().groups_done == 4
        assert reader.record(0).worker == "second"
        assert reader.committed()[0].discards == 1
    note = json.loads(root.store.get("discarded/0000/0000000.1.json"))
    assert (note["why"], json.loads(note["record"])["tar"]) == (
        "a flipped bit",
        commit_record(0).tar,
    )


def test_a_kill_between_tombstone_and_removal_leaves_the_shard_missing(root, monkeypatch):
    root.commit(commit_record(0))
    root.write_index()

    def killed(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(root.store, "delete", killed)
    with pytest.raises(KeyboardInterrupt):
        root.discard(0)
    reopened = Root(root.url)
    assert reopened.store.exists(record_name(0))
    assert reopened.missing() == [0, 1, 2]
    assert not reopened.is_committed(0)
    assert reopened.commit(commit_record(0, worker="second"))
    assert Root(root.url).missing() == [1, 2]


def test_a_full_folder_is_looked_at_again_once_a_shard_of_it_is_discarded(large):
    reader, writer = Root(large.url), Root(large.url)
    assert reader.missing() == list(range(MANY, MANY + 5))
    writer.discard(1234)
    assert reader.missing(1000, 2000) == [1234]
    assert writer.commit(commit_record(1234))
    assert reader.missing() == list(range(MANY, MANY + 5))
    writer.discard(1234)  # the folder was complete with a tombstone in it
    assert reader.missing(1000, 2000) == [1234]
    writer.commit(commit_record(1234))


@pytest.fixture
def attempts_store(tmp_path):
    """Attempts at four shards, two of them at shard 1."""
    store = Store(str(tmp_path))
    for shard in (1, 1, 2, 1005, 4000):
        Attempts(store).add(failure(shard))
    return store


def test_attempts_are_counted_without_reading_them(attempts_store):
    counting = Counting(attempts_store)
    attempts_found = Attempts(counting).numbers([0, 1, 1005, 2000])
    assert list(attempts_found.items()) == [(1, [1, 2]), (1005, [1])]
    # One listing of folders, and one of each folder with a missing shard that failed.
    assert counting.calls == {"scan": 1 + 2}
    assert (Attempts(attempts_store).last(1), Attempts(attempts_store).last(0)) == (2, 0)


def test_attempts_are_read_together_with_their_numbers(attempts_store):
    counting = Counting(attempts_store)
    attempts = Attempts(counting)
    attempts_found = attempts.read(attempts.numbers(range(5000)))
    assert [(shard, [f.attempt for f in tries]) for shard, tries in attempts_found.items()] == [
        (1, [1, 2]),
        (2, [1]),
        (1005, [1]),
        (4000, [1]),
    ]
    assert counting.calls["get"] == 5


def test_a_shard_of_which_no_record_can_be_read_still_failed(attempts_store):
    attempts_store.put(attempt_name(2, 1), b"{")
    attempts_store.put(attempt_name(1, 2), b"{")
    numbers = Attempts(attempts_store).numbers([1, 2, 4000])
    attempts_store.delete(attempt_name(4000, 1))  # the shard was made since, and the file removed
    attempts_found = Attempts(attempts_store).read(numbers)
    assert [f.message for f in attempts_found[1]] == ["group 3: flat"]  # of the other attempt
    assert [attempts_found[shard][0].message.partition(": ")[0] for shard in (2, 4000)] == [
        "failed/0000/0000002.1.json",
        "failed/0004/0004000.1.json",
    ]
    assert (attempts_found[2][0].attempt, attempts_found[2][0].error) == (1, "unknown")
    assert Attempts(attempts_store).last(2) == 1


def test_the_longest_message_of_an_attempt_can_be_read_back(attempts_store):
    Attempts(attempts_store).add(failure(7, message="\x00" * 10**7))
    (attempts_found,) = Attempts(attempts_store).read({7: [1]})[7]
    assert attempts_found.message == "\x00" * 10_000
