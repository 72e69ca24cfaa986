"""Single series of a root, found by their group number."""

from collections.abc import Sequence

from data.errors import InputError
from data.root import Root
from data.shards import GroupSample, read_tar


def some_of_all_pairs(root: Root, count: int = 10) -> list[int]:
    """Group numbers spread evenly over what is committed, not chosen by look."""
    groups = [
        group
        for record in root.committed().values()
        for group in range(record["first"], record["first"] + record["groups"])
    ]
    if not groups:
        raise InputError("url", root.url, "holds no finished series yet; run `semix resume`")
    step = max(1, len(groups) // count)
    return groups[step // 2 :: step][:count]


def read_series(root: Root, groups: Sequence[int]) -> list[GroupSample]:
    """The series of these groups, in their order.

    Raises:
        InputError: a group that is in no committed shard.
    """
    found: dict[int, GroupSample] = {}
    for record in root.committed().values():
        inside = set(range(record["first"], record["first"] + record["groups"]))
        if inside & set(groups):
            with root.store.open(record["tar"]) as file:
                found |= {s.record["group"]: s for s in read_tar(file)}
    for group in groups:
        if group not in found:
            raise InputError("groups", group, f"is in no finished shard of {root.url}")
    return [found[group] for group in groups]
