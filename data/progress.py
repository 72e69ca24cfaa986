"""How far a root is, summed over its commit records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.sums import MICRO, Sums


@dataclass(frozen=True)
class Progress:
    """Counts over a root.

    Attributes:
        seconds: worker time, summed over the committed shards.
        stages: where it went; stages overlap, so they may add up to more.
        tflop: computed for the committed shards; None if one of them does not say.
    """

    shards: int
    done: int
    failed: int
    groups: int
    groups_done: int
    images: int
    images_done: int
    seconds: float
    stages: dict[str, float]
    tflop: float | None


def progress_of(plan: Mapping[str, Any], sums: Sums, *, failed: int) -> Progress:
    """The progress of a plan whose committed shards add up to this, and so many failed."""
    images = plan["images_per_group"]
    return Progress(
        shards=plan["num_shards"],
        done=sums.shards,
        failed=failed,
        groups=plan["num_groups"],
        groups_done=sums.groups,
        images=plan["num_groups"] * images,
        images_done=sums.groups * images,
        seconds=sums.wall / MICRO,
        stages=sums.seconds(),
        tflop=None if sums.untold else sums.tflop / MICRO,
    )
