"""Indices: one line per shard, read completely or rejected, numbered and never overwritten."""

import pytest

from semix.data.formats import ShardEntry
from semix.data.index import (
    ShardRows,
    index_names,
    index_text,
    newest_index,
    open_index,
    read_index,
)
from semix.data.index import write_index as write
from semix.data.store import Store
from tests.data.whole_roots import commit_record
from tests.handmade import PLAN_DIGEST

MANY = 2500  # shards; lines are parsed a thousand at a time


def entry(shard: int, **changes) -> ShardEntry:
    return commit_record(shard, **changes).entry(900)


def rows(*shards: int) -> ShardRows:
    return ShardRows.of(entry(shard) for shard in shards)


def text(*shards: int) -> bytes:
    return index_text(PLAN_DIGEST, rows(*shards))


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path))


def test_all_that_an_entry_says_comes_back():
    left_out = [{"group": 3, "reason": "flat"}]
    entries = [
        entry(0, tflop=None, seconds={}, attempt=2**63 - 1, discards=2**40),
        entry(2, prototypes="ab" * 32, pairs="cd" * 32, left_out=left_out, groups=1, first=2),
        entry(9_999_999, first=7, wall_seconds=1e-9),
    ]
    content = index_text(PLAN_DIGEST, ShardRows.of(entries))
    assert content.count(b"\n") == 2 + len(entries)
    plan, result = read_index(content)
    assert (plan, list(result)) == (PLAN_DIGEST, entries)
    assert index_text(plan, result) == content
    assert read_index(text())[1].numbers.tolist() == []


def test_rows_ascend_and_are_found_by_number():
    ordered = rows(7, 3, 12, 5)
    assert ordered.numbers.tolist() == [3, 5, 7, 12]
    assert (ordered.find(5), ordered.find(6), ordered.find(13)) == (entry(5), None, None)
    assert ordered.between(5, 12).numbers.tolist() == [5, 7]
    deduplicated = ShardRows.of([entry(5), entry(3), entry(5, attempt=2)])
    assert (deduplicated.numbers.tolist(), deduplicated.find(5).attempt) == ([3, 5], 2)


def test_the_digest_is_of_what_is_pinned_not_of_when_it_was_made():
    later = {"worker": "b", "wall_seconds": 9.0, "seconds": {}, "attempt": 2, "discards": 1}
    same_content = [ShardRows.of([entry(3), entry(5, **changes)]) for changes in ({}, later)]
    assert same_content[0].digest == same_content[1].digest
    assert index_text(PLAN_DIGEST, same_content[0]) != index_text(PLAN_DIGEST, same_content[1])
    different = [rows(3), rows(5), rows(3, 6)]
    for column in ("sha256", "features_sha256"):
        different.append(ShardRows(rows(3, 5).array.copy()))
        different[-1].array[column][1] = b"0" * 64
    assert len({same_content[0].digest, *(rows_read.digest for rows_read in different)}) == 6


def test_an_index_larger_than_what_is_parsed_at_a_time():
    content = text(*range(MANY))
    assert read_index(content)[1].numbers.tolist() == list(range(MANY))
    lines = content.split(b"\n")
    for line_number in (1, 1000, 1001, MANY):
        damaged = [
            *lines[:line_number],
            lines[line_number][:-20] + lines[line_number][-19:],
            *lines[line_number + 1 :],
        ]
        with pytest.raises(ValueError, match=r"^index: "):
            read_index(b"\n".join(damaged))
        with pytest.raises(ValueError, match=r"^index: shards do not ascend"):
            read_index(b"\n".join([*lines[:line_number], lines[1], *lines[line_number:]]))


def test_an_index_cut_anywhere_is_damaged_not_short():
    content = text(3, 5).rstrip()
    assert len(read_index(content)[1]) == 2
    for cut in range(len(content)):
        with pytest.raises(ValueError, match=r"^index: "):
            read_index(content[:cut])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (PLAN_DIGEST.encode(), b"../x", "plan: "),
        (b'"shards":[', b'"shards":[1', "shards: .*at most 0 items"),
        (b'{"plan"', b'{"more":1,"plan"', "more: Extra inputs"),
        (b'{"plan"', b'{"plan":"%s","plan"' % PLAN_DIGEST.encode(), "key 'plan' is there twice"),
        (b"0000003-", b"0000004-", r"0\.tar is not|0: tar is not"),
        (b"shards/0000/0000003-", b"../../etc/passwd", "tar is not"),
        (b'"groups":2', b'"groups":2,"groups":2', "key 'groups' is there twice"),
        (b'"groups":2', b'"groups":2,"more":1', r"0\.more: Extra inputs"),
        (b'"groups":2', b'"groups":1e999', "groups"),
        (b'"record_bytes":900', b'"record_bytes":%d' % 2**63, r"record_bytes: .*less than"),
        (b'"tflop":0.25', b'"tflop":NaN', "tflop"),
        (b'"tflop":0.25', b'"tflop":' + b"[" * 99_999, "recursion limit"),
        (b'"groups":2', b'"groups":' + b"9" * 9999, "groups|out of range"),
        (b"\n]}", b"\n]}\n{}", "it has bytes after its end, or is cut"),
        (b"\n]}", b"\n]]}", "."),
        (b"\n", b" ", "."),
    ],
)
def test_what_is_no_index_is_refused(old, new, message):
    content = text(3)
    assert old in content
    with pytest.raises(ValueError, match=f"^index: .*({message})"):
        read_index(content.replace(old, new))


def test_the_newest_that_can_be_read_is_taken(store, caplog):
    assert newest_index(store, PLAN_DIGEST) is None
    assert write(store, rows(0, 2), plan=PLAN_DIGEST) == "index/0.json"
    store.put("index/1.json", b"{")
    store.put("index/2.json", index_text("e" * 64, rows(5)))
    store.put("index/notes.json", b"of a person")
    newest = newest_index(store, PLAN_DIGEST)
    assert (newest.name, newest.shards()) == ("index/0.json", [entry(0), entry(2)])
    assert "index/1.json: index: " in caplog.text
    assert "index/2.json: belongs to another plan; its records are read instead" in caplog.text
    with pytest.raises(ValueError, match=r"^index/2\.json: belongs to another plan"):
        open_index(store, "index/2.json", plan_digest=PLAN_DIGEST)
    with pytest.raises(FileNotFoundError):
        open_index(store, "index/3.json")


def test_an_index_is_new_only_when_something_changed(store):
    assert write(store, rows(0), plan=PLAN_DIGEST) == "index/0.json"
    assert write(store, rows(0), plan=PLAN_DIGEST) == "index/0.json"
    assert write(store, rows(0, 2), plan=PLAN_DIGEST) == "index/1.json"
    assert write(store, rows(0), plan=PLAN_DIGEST) == "index/2.json"  # because the newest differs
    store.delete("index/0.json")
    assert write(store, rows(1), plan=PLAN_DIGEST) == "index/3.json"  # 2 is another's
    for number in (1, 2):
        store.delete(f"index/{number}.json")
    store.put("index/0.json", text(0))
    assert write(store, rows(5), plan=PLAN_DIGEST) == "index/4.json"  # with 0 and 3 left
    for number in (9, 10):
        store.put(f"index/{number}.json", text(number))
    assert index_names(store)[-2:] == ["index/9.json", "index/10.json"]
    assert newest_index(store, PLAN_DIGEST).rows.numbers.tolist() == [10]


def test_a_million_rows_take_half_a_gigabyte():
    assert rows(1).array.nbytes <= 512
