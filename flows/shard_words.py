"""Shards in a message that a person reads, however many they are."""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice

from data.formats import Failure
from data.ranges import format_ranges

MOST_RANGES = 20  # in one message, which Prefect stores and shows


def few_ranges(shards: Iterable[int]) -> str:
    """`3,7-9`; of very many ranges the first ones."""
    ranges = format_ranges(shards).split(",")
    more = f" and {len(ranges) - MOST_RANGES} more ranges" if len(ranges) > MOST_RANGES else ""
    return ",".join(ranges[:MOST_RANGES]) + more


def reasons(
    failures: Mapping[int, Sequence[Failure]], lacking: Container[int], most: int = 3
) -> list[str]:
    """`shard 3: OSError: disk full` for the first of the lacking shards that failed."""
    failed = ((shard, tries) for shard, tries in failures.items() if shard in lacking)
    return [
        f"shard {shard}: {tries[-1].error}: {tries[-1].message}"
        for shard, tries in islice(failed, most)
    ]
