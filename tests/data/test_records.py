"""Commit records, failed attempts and tombstones: what a listing decides, and what it costs."""

import json
from pathlib import Path

import pytest

from semix.data.errors import InputError
from semix.data.formats import CommitRecord, attempt_name, record_name
from semix.data.index import open_index
from semix.data.records import Attempts, read_folder
from semix.data.root import DamagedShards, Root
from semix.data.store import Store
from semix.data.verify import quarantine
from tests.data.whole_roots import Counting, commit_record, empty_root, failure
from tests.handmade import PLAN_DIGEST

MANY = 3000


@pytest.fixture
def root(tmp_path):
    return empty_root(tmp_path)


def put_record(root, shard, content=None, **changes):
    """Put a record and the files that it names."""
    record = commit_record(shard, **changes)
    for name in (record.tar, record.features.name):
        root.store.put(name, b"abc")
    root.store.put(record_name(shard), record.written() if content is None else content)


def folder_of(root, number=0):
    return read_folder(root.store, number, plan=PLAN_DIGEST, layout=root.layout)


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


def test_a_listing_decides_and_no_record_is_read(large):
    root = Root(large.url)
    root.store = store = Counting(root.store)
    assert root.missing() == list(range(MANY, MANY + 5))
    assert store.calls == {"scan": 1 + 4}  # the folders, then each of them
    store.calls.clear()
    progress = root.progress()
    assert (progress.done, progress.groups_done) == (MANY, 2 * MANY)
    assert store.calls == {"scan": 1 + 4}
    assert root.is_committed(7) and not root.is_committed(MANY)


def test_each_listed_folder_calls_the_heartbeat(large):
    heartbeats = []
    root = Root(large.url, heartbeat=lambda: heartbeats.append(1))
    root.missing()
    assert len(heartbeats) == 4


def test_only_the_folders_that_are_asked_for_are_listed(large):
    root = Root(large.url)
    root.store = store = Counting(root.store)
    assert root.missing(1200, 1900) == []
    assert store.calls == {"scan": 1 + 1}
    assert root.missing(2500, 10**6) == list(range(MANY, MANY + 5))


def test_totals_come_from_the_records(root):
    put_record(root, 0, groups=1, left_out=[{"group": 1, "reason": "flat"}])
    put_record(root, 1)
    totals = root.totals()
    assert (totals.left_out, totals.seconds) == (1, 4.0)
    assert totals.stages == {"generate": 3.0, "write": 1.0}
    assert root.progress().groups_done == 4  # as planned
    root.write_index()
    (pinned, _) = open_index(root.store, "index/0.json").shards
    assert (pinned.first, pinned.group_numbers) == (0, [0])


DAMAGED = [
    (b"", "commit record: "),
    (b'{"shard": 1, "sp', "commit record: "),
    (b"\xff\xfe\x00", "commit record: "),
    (commit_record(1).written()[:-1] + b',"x":' + b"[" * 99_999, "commit record: "),
    (b" " * (CommitRecord.MAX_BYTES + 1), "has 1048577 bytes, far too many"),
    (commit_record(2).written(), "is the record of shard 2"),
    (commit_record(1, plan="e" * 64).written(), "belongs to another plan"),
    (commit_record(1).written().replace(b".tar", b".gz"), "commit record: tar is not"),
    (commit_record(1, attempt=9**9).written().replace(b"387420489", b"9" * 30), "commit record: "),
    (commit_record(1).written().replace(b":3", b":%d" % 2**63), "commit record: "),
]


@pytest.mark.parametrize(("content", "reason"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_foreign_record_is_no_part_of_an_index(root, content, reason):
    put_record(root, 0)
    put_record(root, 1, content)
    assert root.done() == [0, 1]
    folder = folder_of(root)
    assert [record.shard for record in folder.intact] == [0]
    ((shard, text, files),) = [(p.shard, p.text, p.files) for p in folder.problems]
    assert (shard, files) == (1, (record_name(1),))
    assert text.startswith(f"its commit record {reason}")
    with pytest.raises(ValueError, match=r"0000001\.json"):
        root.record(1)
    with pytest.raises(DamagedShards, match=r"1 damaged shards; `semix resume") as raised:
        root.write_index()
    assert root.indices() == []
    assert quarantine(root, raised.value.problems) == 1
    assert root.missing() == [1, 2]
    assert root.write_index() == "index/0.json"


def test_no_index_pins_files_that_are_missing_or_cut(root):
    for shard in range(3):
        put_record(root, shard)
    tar, features = commit_record(0).tar, commit_record(1).features.name
    root.store.put(tar, b"ab")
    root.store.delete(features)
    texts = [str(problem) for problem in folder_of(root).problems]
    assert texts == [f"shard 0: {tar} has 2 bytes, not 3", f"shard 1: {features} is missing"]
    with pytest.raises(DamagedShards, match="2 damaged shards") as raised:
        root.write_index()
    assert quarantine(root, raised.value.problems) == 2
    assert root.missing() == [0, 1]


def test_a_record_of_a_newer_version_is_left_alone(root):
    put_record(root, 1, commit_record(1).written()[:-1] + b',"schema":9}')
    with pytest.raises(InputError, match=r"0000001\.json schema = 9: a newer version of semix"):
        root.write_index()
    assert root.done() == [1]


def test_a_discarded_record_leaves_a_tombstone(root):
    for shard in (0, 1):
        put_record(root, shard)
    root.write_index()
    opened_before = Root(root.url)
    root.discard(0, why="a flipped bit")
    assert opened_before.done() == [1]
    assert opened_before.progress().groups_done == 2
    assert root.commit(commit_record(0, worker="second"))
    assert opened_before.done() == [0, 1]
    assert opened_before.record(0).worker == "second"
    root.discard(0, why="again")
    note = json.loads(root.store.get("discarded/0000/0000000.1.json"))
    assert (note["why"], json.loads(note["record"])["tar"]) == (
        "a flipped bit",
        commit_record(0).tar,
    )
    assert json.loads(root.store.get("discarded/0000/0000000.2.json"))["why"] == "again"


def test_a_kill_between_tombstone_and_removal_is_healed_by_the_next_attempt(root, monkeypatch):
    put_record(root, 0, b"{")

    def killed(name):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(root.store, "delete", killed)
        root.discard(0)
    with pytest.raises(DamagedShards) as raised:  # it is still there, and still damaged
        Root(root.url).write_index()
    assert quarantine(root, raised.value.problems) == 1
    assert root.missing() == [0, 1, 2]


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
