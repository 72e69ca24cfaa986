"""Indices: one line per shard, read completely or rejected, numbered and never overwritten."""

import pytest

from semix.data.formats import ShardEntry
from semix.data.index import (
    Index,
    index_names,
    index_text,
    iterate_index,
    open_index,
    read_index,
)
from semix.data.index import write_index as write
from semix.data.store import Store
from tests.data.whole_roots import commit_record
from tests.handmade import PLAN_DIGEST

MANY = 2500  # shards; lines are parsed a thousand at a time
PROTOTYPES = "ab" * 32


def entry(shard: int, **changes) -> ShardEntry:
    return commit_record(shard, **changes).entry


def text(*shards: int) -> bytes:
    return index_text(PLAN_DIGEST, [entry(shard).written() for shard in shards])


def shards_of(content: bytes) -> list[ShardEntry]:
    return list(read_index(content)[1])


def numbers_of(content: bytes) -> list[int]:
    return [entry.shard for entry in shards_of(content)]


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path))


def test_all_that_an_entry_says_comes_back():
    left_out = [{"group": 3, "reason": "flat"}]
    entries = [
        entry(0),
        entry(2, left_out=left_out, groups=1, first=2),
        entry(9_999_999, first=7),
    ]
    lines = [each.written() for each in entries]
    content = index_text(PLAN_DIGEST, lines, prototypes=PROTOTYPES)
    assert content.count(b"\n") == 2 + len(entries)
    header, shards = read_index(content)
    assert (header.plan, header.prototypes, list(shards)) == (PLAN_DIGEST, PROTOTYPES, entries)
    assert shards_of(text()) == []


def test_an_entry_is_what_readers_pin_and_not_who_made_it():
    later = {"worker": "b", "wall_seconds": 9.0, "seconds": {}, "attempt": 2}
    assert entry(5, **later) == entry(5)
    assert b"seconds" not in text(5)


def test_the_digest_is_of_what_is_pinned():
    def digest(*entries: ShardEntry) -> str:
        return Index("index/0.json", PLAN_DIGEST, "", list(entries)).digest

    other = "0" * 64
    changed = [
        entry(5).model_copy(update={"sha256": other}),
        entry(5).model_copy(
            update={"features": entry(5).features.model_copy(update={"sha256": other})}
        ),
    ]
    digests = [digest(entry(3), each) for each in (entry(5), entry(6), *changed)]
    assert len({*digests, digest(entry(3))}) == 5
    assert digest(entry(3), entry(5)) == digests[0]


def test_an_index_larger_than_what_is_parsed_at_a_time():
    content = text(*range(MANY))
    assert numbers_of(content) == list(range(MANY))
    lines = content.split(b"\n")
    for line_number in (1, 1000, 1001, MANY):
        damaged = [
            *lines[:line_number],
            lines[line_number][:-20] + lines[line_number][-19:],
            *lines[line_number + 1 :],
        ]
        with pytest.raises(ValueError, match=r"^index: "):
            shards_of(b"\n".join(damaged))
        with pytest.raises(ValueError, match=r"^index: shards do not ascend"):
            shards_of(b"\n".join([*lines[:line_number], lines[1], *lines[line_number:]]))


def test_an_index_cut_anywhere_is_damaged_not_short():
    content = text(3, 5).rstrip()
    assert len(shards_of(content)) == 2
    for cut in range(len(content)):
        with pytest.raises(ValueError, match=r"^index: "):
            shards_of(content[:cut])


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
        (b'"groups":2', b'"groups":' + b"[" * 99_999, "recursion limit"),
        (b'"groups":2', b'"groups":2,"seconds":{}', r"0\.seconds: Extra inputs"),
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
        shards_of(content.replace(old, new))


def test_an_index_of_another_plan_or_damaged_is_named(store):
    store.put("index/1.json", b"{")
    store.put("index/2.json", index_text("e" * 64, [entry(5).written()]))
    store.put("index/notes.json", b"of a person")
    assert index_names(store) == ["index/1.json", "index/2.json"]
    with pytest.raises(ValueError, match=r"^index/1\.json: index: "):
        open_index(store, "index/1.json")
    with pytest.raises(ValueError, match=r"^index/2\.json: belongs to another plan"):
        list(iterate_index(store, "index/2.json", plan_digest=PLAN_DIGEST))
    with pytest.raises(FileNotFoundError):
        open_index(store, "index/3.json")


def test_an_index_is_new_only_when_something_changed(store):
    assert write(store, text(0)) == "index/0.json"
    assert write(store, text(0)) == "index/0.json"
    assert write(store, text(0, 2)) == "index/1.json"
    assert write(store, text(0)) == "index/2.json"  # because the newest differs
    store.delete("index/0.json")
    assert write(store, text(1)) == "index/3.json"  # 2 is another's
    for number in (1, 2):
        store.delete(f"index/{number}.json")
    store.put("index/0.json", text(0))
    assert write(store, text(5)) == "index/4.json"  # with 0 and 3 left
    for number in (9, 10):
        store.put(f"index/{number}.json", text(number))
    assert index_names(store)[-2:] == ["index/9.json", "index/10.json"]
