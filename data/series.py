"""Single series of a root, found by their group number."""

from collections.abc import Sequence

import numpy as np

from data.errors import InputError
from data.root import Root
from data.shards import GroupSample, read_shard


def some_of_all_pairs(root: Root, count: int = 10) -> list[int]:
    """Group numbers spread evenly over what is committed, not chosen by look."""
    shards = root.done()
    if not shards:
        raise InputError("url", root.url, "holds no finished series yet; run `semix resume`")
    ends = np.cumsum([len(root.layout.groups_of(shard)) for shard in shards])
    step = max(1, int(ends[-1]) // count)
    found = []
    for place in range(step // 2, int(ends[-1]), step)[:count]:
        at = int(np.searchsorted(ends, place, side="right"))
        groups = root.layout.groups_of(shards[at])
        found.append(groups[place - int(ends[at]) + len(groups)])
    return found


def shard_of(root: Root, group: int) -> int:
    """The shard that a group belongs to, made or not. Raises InputError."""
    last = root.plan["num_groups"] - 1
    if not 0 <= group <= last:
        raise InputError("group", group, f"{root.url} has groups 0 to {last}")
    return root.layout.shard_of(group)


def read_series(root: Root, groups: Sequence[int]) -> list[GroupSample]:
    """The series of these groups, in their order; only their shards are read.

    Raises:
        InputError: a group that is in no committed shard.
        ValueError: a shard is damaged.
    """
    found: dict[int, GroupSample] = {}
    for shard in sorted({shard_of(root, group) for group in groups}):
        record = root.record(shard)
        if record is not None:
            wanted = set(groups) & set(root.layout.groups_of(shard))
            samples = read_shard(root.store, record, num_classes=len(root.plan["class_names"]))
            found |= {s.record["group"]: s for s in samples if s.record["group"] in wanted}
    for group in groups:
        if group not in found:
            remedy = f"is not made yet; run `semix resume {root.url} --shards "
            raise InputError("group", group, f"{remedy}{shard_of(root, group)}`")
    return [found[group] for group in groups]
