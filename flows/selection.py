"""Which shards a run makes, and how many it may end without."""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from data.errors import InputError
from data.ranges import format_ranges
from data.root import Root


@dataclass(frozen=True)
class Selection:
    """What is asked of a run.

    Attributes:
        shards: only these; all if empty.
        retry_failed: only what failed before and is still missing.
        skip_failed: leave that out instead, and end well without it if it is at most this many
            shards, as `5`, or this share of all, as `1%`; empty to leave nothing out.
    Raises:
        InputError: both at once, or a limit that is neither.
    """

    shards: Collection[int] = frozenset()
    retry_failed: bool = False
    skip_failed: str = ""

    def __post_init__(self) -> None:
        if self.retry_failed and self.skip_failed:
            remedy = "failed shards are either tried again or left out; drop one of the two"
            raise InputError("--retry-failed", f"with --skip-failed {self.skip_failed}", remedy)
        if self.skip_failed:
            most_failed(self.skip_failed, 1)

    def allowed(self, root: Root) -> int | None:
        """How many shards of this root may fail; None if it shall be complete."""
        return most_failed(self.skip_failed, root.plan.num_shards) if self.skip_failed else None

    def wanted(self, root: Root) -> list[int]:
        """The missing shards that this run shall try."""
        lacking = lacking_shards(root, self.shards)
        if not (self.retry_failed or self.skip_failed):
            return lacking
        failed = root.failed_attempts(lacking)
        return [shard for shard in lacking if (shard in failed) == self.retry_failed]


def most_failed(limit: str, total: int) -> int:
    """`5` or `1%` of `total` as a number of shards, rounded down. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", limit.strip())
    if not match or (not match[2] and "." in match[1]) or (match[2] and float(match[1]) > 100):
        raise InputError("skip-failed", limit, "give a number of shards, as 5, or a share, as 1%")
    return math.floor(float(match[1]) * total / 100) if match[2] else int(match[1])


def lacking_shards(root: Root, shards: Collection[int] = ()) -> list[int]:
    """Missing shards, of `shards` if any are named. Raises InputError for one not in the plan."""
    total = root.plan.num_shards
    if not shards:
        return root.missing()
    outside = [shard for shard in shards if shard >= total]
    if outside:
        raise InputError("shards", format_ranges(outside), f"this root has shards 0 to {total - 1}")
    wanted = frozenset(shards)
    return [shard for shard in root.missing() if shard in wanted]


def gaps(
    root: Root, shards: Collection[int], *, allowed: int | None
) -> tuple[list[int], list[int]]:
    """What is wrongly missing after a run, and what may be.

    Args:
        shards: those that were asked for; all if empty.
        allowed: how many of all shards may have failed; None if none was to be left out.
    Returns:
        the shards that make the run a failure, and those that failed and were left out.
    """
    lacking = lacking_shards(root, shards)
    if allowed is None:
        return lacking, []
    failed = root.failed_attempts()
    if len(failed) <= allowed and failed.keys() >= set(lacking):
        return [], sorted(failed)
    return sorted({*lacking, *failed}), []
