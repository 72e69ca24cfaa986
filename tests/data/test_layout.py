"""Which groups are in which shard, and what is added behind the last."""

import json

import pytest

from data.errors import InputError
from data.layout import layout, next_extension, read_extensions, write_extension
from data.root import Root
from tests.data.whole_roots import empty_root
from tests.handmade import PLAN_DIGEST, make_plan


def added(groups_per_pair: int, before, pairs: int = 5):
    return next_extension(PLAN_DIGEST, before, groups_per_pair, pairs)


def test_shards_of_a_plan_cover_its_groups_once():
    whole = layout(10, 4)
    assert [list(whole.groups_of(shard)) for shard in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert [whole.shard_of(group) for group in range(10)] == [0] * 4 + [1] * 4 + [2] * 2


def test_what_is_added_lies_behind_and_moves_nothing():
    base = layout(10, 4)
    first = added(3, base)  # 15 groups
    once = layout(10, 4, [first])
    twice = layout(10, 4, [first, added(4, once)])
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
    whole = layout(20, 4)
    with pytest.raises(IndexError, match=f"group {number}: the plan has 20"):
        whole.shard_of(number)
    with pytest.raises(IndexError, match="shard 5: the plan has 5"):
        whole.groups_of(5)


@pytest.fixture
def root(tmp_path):
    return empty_root(tmp_path, shards=3, groups=2)


def test_only_one_of_two_that_extend_at_once_succeeds(root):
    assert write_extension(root.store, 1, added(2, root.layout, 6))
    assert not write_extension(root.store, 1, added(3, root.layout, 6))
    assert Root(root.url).plan.num_groups == 12
    assert Root(root.url).extensions[0].groups_per_pair == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first_group": 5}, r"does not continue what is before it \(first_group\)"),
        ({"first_shard": 4}, r"does not continue what is before it \(first_shard\)"),
        ({"shards": 9}, r"does not continue what is before it \(shards\)"),
        ({"plan": "e" * 64}, "belongs to another plan"),
        ({"groups": 0}, "extension: groups: "),
        ({"groups": 10**30, "shards": 5 * 10**29}, "extension: groups: "),
        ({"more": 1}, "extension: more: "),
    ],
)
def test_an_extension_that_does_not_fit_is_refused(root, change, reason):
    values = json.loads(added(2, root.layout, 6).written()) | change
    root.store.create("extensions/1.json", json.dumps(values).encode())
    with pytest.raises(InputError, match=rf"extensions/1\.json = damaged: {reason}"):
        Root(root.url)


def test_a_lost_extension_is_named(root):
    first = added(2, root.layout, 6)
    write_extension(root.store, 1, first)
    second = added(3, Root(root.url).layout, 6)
    write_extension(root.store, 2, second)
    assert read_extensions(root.store, root.written) == [first, second]
    root.store.delete("extensions/1.json")
    with pytest.raises(InputError, match=r"extensions/1\.json = damaged: .*bring it back"):
        Root(root.url)


def test_a_plan_that_does_not_say_how_large_its_shards_are(root):
    plan = make_plan(3, 6, config={"shards": {"groups_per_shard": 0}})
    root.store.put("plan.json", json.dumps(plan).encode())
    with pytest.raises(InputError, match=r"config\.shards\.groups_per_shard = 0: is not"):
        assert Root(root.url).layout
