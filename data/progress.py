"""How far a root is, summed over its commit records."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


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


def summed(
    plan: Mapping[str, Any], records: Collection[Mapping[str, Any]], *, failed: int
) -> Progress:
    """The progress of a plan of which these shards are committed and so many failed."""
    images = plan["images_per_group"]
    groups_done = sum(record["groups"] for record in records)
    stages: dict[str, float] = defaultdict(float)
    for record in records:
        for stage, seconds in record["seconds"].items():
            stages[stage] += seconds
    tflop: list[Any] = [record.get("tflop") for record in records]
    return Progress(
        shards=plan["num_shards"],
        done=len(records),
        failed=failed,
        groups=plan["num_groups"],
        groups_done=groups_done,
        images=plan["num_groups"] * images,
        images_done=groups_done * images,
        seconds=sum(record["wall_seconds"] for record in records),
        stages=dict(stages),
        tflop=None if None in tflop else sum(tflop),
    )
