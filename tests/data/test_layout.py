"""Which series are in which shard, extensions after the last shard; ranges of shard numbers."""

import json

import pytest

from semix.data.errors import InputError
from semix.data.layout import layout, next_extension, read_extensions, write_extension
from semix.data.ranges import WHOLE, Partition, format_ranges, parse_partition, parse_ranges
from semix.data.root import Root
from tests.data.whole_roots import empty_root
from tests.handmade import PLAN_DIGEST


def extension(groups_per_pair: int, before, pairs: int = 5):
    groups = groups_per_pair * pairs - before.num_groups
    return next_extension(PLAN_DIGEST, before, groups, groups_per_pair=groups_per_pair)


def test_shards_of_a_plan_cover_its_groups_once():
    complete = layout(10, 4)
    assert [list(complete.groups_of(shard)) for shard in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert [complete.shard_of(group) for group in range(10)] == [0] * 4 + [1] * 4 + [2] * 2


def test_what_is_added_lies_behind_and_moves_nothing():
    base = layout(10, 4)
    first = extension(3, base)  # 15 groups
    once = layout(10, 4, [first])
    twice = layout(10, 4, [first, extension(4, once)])
    assert (twice.num_groups, twice.num_shards) == (20, 7)
    assert [list(twice.groups_of(shard)) for shard in range(7)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],  # stays short
        [10, 11, 12, 13],
        [14],
        [15, 16, 17, 18],
        [19],
    ]
    assert all(group in twice.groups_of(twice.shard_of(group)) for group in range(20))


@pytest.mark.parametrize("number", [-1, 20])
def test_out_of_range_is_an_error(number):
    complete = layout(20, 4)
    with pytest.raises(IndexError, match=f"group {number}: the plan has 20"):
        complete.shard_of(number)
    with pytest.raises(IndexError, match="shard 5: the plan has 5"):
        complete.groups_of(5)


@pytest.fixture
def root(tmp_path):
    return empty_root(tmp_path, shards=3, groups=2)


def test_only_one_of_two_that_extend_at_once_succeeds(root):
    assert write_extension(root.store, 1, extension(2, root.layout, 6))
    assert not write_extension(root.store, 1, extension(3, root.layout, 6))
    assert Root(root.url).plan.num_groups == 12
    assert Root(root.url).extensions[0].groups_per_pair == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first_group": 5}, r"does not continue the one before it \(first_group\)"),
        ({"first_shard": 4}, r"does not continue the one before it \(first_shard\)"),
        ({"shards": 9}, r"does not continue the one before it \(shards\)"),
        ({"plan": "e" * 64}, "belongs to another plan"),
        ({"groups": 0}, "extension: groups: "),
        ({"groups": 10**30, "shards": 5 * 10**29}, "extension: groups: "),
        ({"more": 1}, "extension: more: "),
    ],
)
def test_an_extension_that_does_not_fit_is_refused(root, change, reason):
    values = json.loads(extension(2, root.layout, 6).written()) | change
    root.store.create("extensions/1.json", json.dumps(values).encode())
    with pytest.raises(InputError, match=rf"extensions/1\.json = damaged: {reason}"):
        Root(root.url)


def test_a_lost_extension_is_named(root):
    first = extension(2, root.layout, 6)
    write_extension(root.store, 1, first)
    second = extension(3, Root(root.url).layout, 6)
    write_extension(root.store, 2, second)
    assert read_extensions(root.store, root.stored_plan) == [first, second]
    root.store.delete("extensions/1.json")
    with pytest.raises(InputError, match=r"extensions/1\.json = damaged: .*restore it"):
        Root(root.url)


def test_ranges_round_trip():
    assert parse_ranges("3, 7-9,8") == [3, 7, 8, 9]
    assert format_ranges([9, 3, 7, 8]) == "3,7-9"
    assert format_ranges([]) == ""


@pytest.mark.parametrize("text", ["", "a", "3-", "9-7", "-1", "1,,2"])
def test_nonsense_is_refused(text):
    with pytest.raises(InputError, match="write numbers and ranges such as 3,7-9"):
        parse_ranges(text)


@pytest.mark.parametrize("text", ["0-10000000", "5,99999999999", "0-9999999999999999"])
def test_more_shards_than_any_root_has_are_refused(text):
    with pytest.raises(InputError, match=r"names too many shards, or .*; at most 10,000,000"):
        parse_ranges(text)


def test_parts_are_contiguous_and_cover_everything_once():
    assert [Partition(i, 3).bounds(10) for i in range(3)] == [(0, 3), (3, 6), (6, 10)]
    assert WHOLE.bounds(10) == (0, 10)
    for of in (1, 2, 7, 12):
        numbers = [n for i in range(of) for n in range(*Partition(i, of).bounds(10))]
        assert numbers == list(range(10))


def test_each_part_turns_to_another_one_first():
    assert [str(part) for part in Partition(2, 4).others()] == ["3/4", "0/4", "1/4"]
    assert WHOLE.others() == []


def test_a_part_is_read_as_it_is_written():
    assert parse_partition("1/4") == Partition(1, 4)
    assert str(parse_partition("1/4")) == "1/4"
    assert parse_partition("") == WHOLE


@pytest.mark.parametrize("text", ["4/4", "1", "-1/4", "1/0", "a/b", "1/4/2", "0 / 4", "0/9999999"])
def test_other_texts_are_refused(text):
    with pytest.raises(InputError, match=f"^range = {text}: write i/n with i from 0 to n - 1"):
        parse_partition(text)
