import json
import logging
from pathlib import Path

import pytest

from data.commit_records import record_name
from data.fingerprint import canonical_json, fingerprint
from data.indices import open_index
from data.records import Records
from data.repair import put_aside
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
    """Three folders full of commit records, without their tars, and an empty one."""
    root = empty_root(tmp_path_factory.mktemp("large"), shards=MANY + 5)
    for shard in range(MANY):
        if shard % 1000 == 0:
            root.store.put(record_name(shard), b"{}")  # makes the folder
        Path(root.url, record_name(shard)).write_text(json.dumps(commit_record(shard)))
    Path(root.url, record_name(MANY)).parent.mkdir()  # of the shards that are missing
    return root


def looking(store, shards=MANY + 5):
    return Records(store, PLAN_DIGEST, shards=shards)


def test_every_record_is_read_once_and_full_folders_are_not_listed_again(large):
    store = Counting(large.store)
    records = looking(store)
    records.look()
    assert (len(records.done()), records.missing()) == (MANY, list(range(MANY, MANY + 5)))
    # Which folders there are with shards and with tombstones; four folders; the indices.
    assert store.calls == {"scan": 2 + 4 + 1, "get": MANY}
    store.calls.clear()
    records.look()
    assert records.sums().shards == MANY
    assert store.calls == {"scan": 2 + 1}  # the one that is not full
    put_record(large, MANY)
    records.look()
    assert records.missing() == list(range(MANY + 1, MANY + 5))
    assert store.calls == {"scan": 3 + 3, "get": 1}
    large.store.delete(record_name(MANY))


def test_a_look_tells_of_each_folder_that_it_has_read(large):
    beats = []
    root = Root(large.url, beat=lambda: beats.append(len(root._records.done())))
    root.missing()
    assert beats == [1000, 2000, 3000, 3000]
    root.missing()
    assert len(beats) == 5  # the folder that is not full


def test_only_the_folders_that_are_asked_for_are_looked_at(large):
    store = Counting(large.store)
    records = looking(store)
    records.look(1200, 1900)
    assert records.missing(1200, 1900) == []
    assert store.calls["get"] == 1000
    assert Root(large.url).missing(2500, 10**6) == list(range(MANY, MANY + 5))


def test_an_index_stands_for_the_records_that_it_knows(large):
    large.write_index()
    store = Counting(large.store)
    records = looking(store)
    records.look()
    assert len(records.done()) == MANY
    assert store.calls == {"scan": 2 + 4 + 1, "get": 1}  # not even its parts
    assert dict(pair for _, found in records.folders() for pair in found.items()) == (
        large.committed()
    )
    assert store.calls["get"] == 1 + 3
    put_record(large, MANY)
    put_record(large, 7, tar=f"{shard_name(7)}-ba7816bf.tar", worker="rewritten: another size")
    store.calls.clear()
    again = looking(store)
    again.look()
    assert len(again.done()) == MANY + 1
    assert store.calls["get"] == 1 + 1 + 2  # the index, a part of it, and what is new
    for shard in (7, MANY):
        put_record(large, shard)
    large.store.delete(record_name(MANY))


def test_another_index_has_the_parts_that_did_not_change(large):
    first = open_index(large.store, large.write_index()).parts
    put_record(large, MANY)
    store = Counting(large.store)
    again = Root(large.url)
    again.store = again._records._store = store
    second = open_index(large.store, again.write_index()).parts
    assert store.calls["put"] == 1
    assert [first[n] == second[n] for n in first] == [True, True, True]
    assert [entry["shard"] for entry in open_index(large.store, again.indices()[-1]).folder(3)] == [
        MANY
    ]
    large.store.delete(record_name(MANY))


def test_what_an_index_keeps_is_what_progress_needs(root):
    root.commit(commit_record(0))
    before = root.progress()
    root.write_index()
    again = Root(root.url)
    entry = again.committed()[0]
    assert again.progress() == before
    assert (entry["first"], entry["wall_seconds"]) == (0, 2.0)
    (pinned,) = open_index(root.store, "index/0.json").shards()
    assert pinned["tar"] == commit_record(0)["tar"]


def test_an_index_of_an_earlier_version_lists_its_shards_itself(root):
    root.commit(commit_record(0))
    root.commit(commit_record(1))
    before, entries = root.progress(), list(root.committed().values())
    inline = {"plan": PLAN_DIGEST, "shards": entries}
    root.store.create("index/0.json", canonical_json(inline).encode())
    opened = open_index(root.store, "index/0.json")
    assert (opened.digest, list(opened.shards())) == (fingerprint(inline), entries)
    store = Counting(root.store)
    records = looking(store, shards=3)
    records.look()
    assert (records.missing(), store.calls["get"]) == ([2], 1)
    again = Root(root.url)
    assert (again.progress(), again.missing()) == (before, [2])
    assert again.write_index() == "index/0.json"  # it says the same, in another form
    again.commit(commit_record(2))
    assert again.write_index() == "index/1.json"
    assert again.store.list("index/parts")


def test_a_part_that_is_damaged_is_passed_over_and_written_again(root, caplog):
    logging.getLogger("semix").propagate = True
    for shard in (0, 1):
        root.commit(commit_record(shard))
    whole = root.write_index()
    (part,) = root.store.list("index/parts")
    content = root.store.get(part)
    for damage in (content[:-1], content.replace(b'"groups":2', b'"groups":3', 1), None):
        root.store.put(part, damage) if damage else root.store.delete(part)
        assert damage != content
        with pytest.raises(ValueError, match=rf"index/0\.json: its part {part} (does not|is mis)"):
            list(open_index(root.store, whole).shards())
        with caplog.at_level(logging.WARNING):
            assert list(Root(root.url).committed()) == [0, 1]
        assert f"{part} " in caplog.text and "the records are read instead" in caplog.text
        caplog.clear()
        again = Root(root.url)
        found = again.verify(full=True)
        (problem,) = [p for p in found if p.kind == "index"]
        assert (part in problem.text, problem.files) == (True, (part,) * bool(damage))
        put_aside(again, [problem])
        assert again.write_index() == whole
        assert root.store.get(part) == content


def test_a_damaged_index_is_passed_over_with_a_warning(root, caplog):
    root.commit(commit_record(0))
    root.write_index()
    root.store.put("index/1.json", b'{"plan": "x", "sha')
    with caplog.at_level(logging.WARNING):
        logging.getLogger("semix").propagate = True
        store = Counting(root.store)
        records = looking(store)
        records.look()
        assert records.done() == [0]
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
    records = looking(root.store, shards=3)
    records.look()
    assert records.done() == [0]
    assert records.find(1) is None
    entries, refused = records.read_folder(0)
    assert (list(entries), list(refused)) == ([0], [1])
    assert refused[1].startswith(reason)
    put_record(root, 1)  # mended by someone else, while we look
    records.look()
    assert (records.done(), records.sums().shards) == ([0, 1], 2)
    assert records.read_folder(0)[1] == {}


def test_a_discarded_record_never_counts_again_whatever_an_index_says(root):
    for shard in (0, 1):
        root.commit(commit_record(shard))
    root.write_index()
    watching = Root(root.url)
    assert watching.done() == list(watching.committed()) == [0, 1]
    root.discard(0, why="a flipped bit")
    assert watching.done() == list(watching.committed()) == [1]
    assert watching.progress().groups_done == 2
    assert root.commit({**commit_record(0), "worker": "second"})
    for look in (watching, Root(root.url)):
        assert look.done() == list(look.committed()) == [0, 1]
        assert look.progress().groups_done == 4
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


def test_a_full_folder_is_looked_at_again_once_a_shard_of_it_is_discarded(large):
    watching, other = Root(large.url), Root(large.url)
    assert watching.missing() == list(range(MANY, MANY + 5))
    other.discard(1234)
    assert watching.missing(1000, 2000) == [1234]
    assert other.commit(commit_record(1234))
    assert watching.missing() == list(range(MANY, MANY + 5))
    other.discard(1234)  # the folder was complete with a tombstone in it
    assert watching.missing(1000, 2000) == [1234]
    other.commit(commit_record(1234))
