"""Single series of a root, found by their group number."""

from collections.abc import Sequence

import numpy as np

from data.errors import InputError
from data.root import Root
from data.shards import GroupSample, read_shard


def some_of_all_pairs(root: Root, count: int = 10) -> list[int]:
    """Committed group numbers of as many sets of classes as possible, not chosen by look."""
    shards = root.done()
    if not shards:
        raise InputError("url", root.url, "holds no finished series yet; run `semix resume`")
    groups = np.concatenate([np.asarray(root.layout.groups_of(shard)) for shard in shards])
    return sorted(groups[spread_over_sets(groups % _sets(root), count)].tolist())


def spread_over_sets(sets: np.ndarray, count: int) -> list[int]:
    """Positions of up to `count` series: distinct sets of classes first, evenly among them.

    Args:
        sets: int [G], which classes each series mixes.
    """
    order = np.argsort(sets, kind="stable")
    _, starts, sizes = np.unique(sets[order], return_index=True, return_counts=True)
    if len(starts) >= count:
        # Later series of the later sets, so that they come from all parts of a dataset.
        return [
            int(order[starts[at] + turn * sizes[at] // count])
            for turn in range(count)
            for at in [(2 * turn + 1) * len(starts) // (2 * count)]
        ]
    before = np.arange(len(sets)) - np.repeat(starts, sizes)  # how often its set came already
    taken: list[int] = order[np.lexsort((order, before))][:count].tolist()
    return taken


def _sets(root: Root) -> int:
    """After how many groups a plan begins anew with its first classes."""
    mixing = root.plan["config"].get("mixing")
    turns = mixing.get("groups_per_pair") if isinstance(mixing, dict) else None
    if not isinstance(turns, int) or turns < 1:
        raise InputError("plan.json: config.mixing.groups_per_pair", turns, "is not what was built")
    return max(1, root.layout.stretches[0].groups // turns)


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
