"""One pass over the shards of an index, decoding on threads; keeps facts, no images."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from data.errors import InputError
from pipeline.audit.series import Examined, Series, examine, joined, stacked
from pipeline.audit.source import Source

Judge = Callable[[np.ndarray], np.ndarray]  # uint8 [M, H, W, 3] to classes, int64 [M]
ENDS_AT_ONCE = 128  # unmixed images that wait for the judge
T = TypeVar("T")


class Unreadable(ValueError):
    """Nothing of an index can be read."""


@dataclass(frozen=True)
class Facts:
    """What one pass found.

    Attributes:
        series: of all shards that could be read, in the order of the index.
        mass: float64 [K], all labels, summed.
        unreadable: by shard what is wrong with it.
        size: height and width of the images.
    """

    series: Series
    mass: np.ndarray
    unreadable: dict[int, str]
    size: tuple[int, int]


def read_facts(
    source: Source, *, judge: Judge | None = None, beat: Callable[[int], None] = lambda groups: None
) -> Facts:
    """Examine every series of a pinned index.

    Args:
        beat: called after each shard with its number of groups.
    Raises:
        Unreadable: no shard can be read; the first one's problem is named.
    """
    parts: list[Series] = []
    mass, unreadable, size = np.zeros(len(source.vectors)), {}, (0, 0)
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        for shard in source.shards:
            try:
                part, its_mass, size = _read_shard(source, shard, pool, 4 * threads, judge)
            except InputError:  # of the judge; no shard is at fault
                raise
            except FileNotFoundError:
                unreadable[shard["shard"]] = f"{shard['tar']}: is not there"
                continue
            except ValueError as error:
                unreadable[shard["shard"]] = _named(shard, error)
                continue
            parts.append(part)
            mass += its_mass
            beat(shard["groups"])
    if not parts:
        first = next(iter(unreadable.values()), "the index lists no shard")
        raise Unreadable(f"no shard of {source.index} can be read: {first}")
    return Facts(joined(parts), mass, unreadable, size)


def in_order(
    pool: ThreadPoolExecutor, calls: Iterable[Callable[[], T]], *, ahead: int
) -> Iterator[T]:
    """Results of calls, in their order, with at most `ahead` of them begun and not taken."""
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) == ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _read_shard(
    source: Source,
    shard: Mapping[str, Any],
    pool: ThreadPoolExecutor,
    ahead: int,
    judge: Judge | None,
) -> tuple[Series, np.ndarray, tuple[int, int]]:
    """Facts of a shard's series, their label mass, and the images' height and width."""
    rows, mass = [], np.zeros(len(source.vectors))
    judged = _Judged(judge)
    for found in in_order(pool, _calls(source, shard), ahead=ahead):
        rows.append(found.series)
        mass += found.mass
        judged.add(found)
    judged.flush()
    return stacked(rows), mass, found.ends.shape[1:3]


def _calls(source: Source, shard: Mapping[str, Any]) -> Iterator[Callable[[], Examined]]:
    features = source.features(shard)
    for row, sample in enumerate(source.samples(shard)):
        if row < len(features):  # one too many is named once all are read
            yield partial(examine, sample, features[row], source.vectors, shard=shard["shard"])


def _named(shard: Mapping[str, Any], error: ValueError) -> str:
    """A problem that names its file; one inside an image does not know in which tar it is."""
    named = str(error).startswith(("shards/", "labels/"))
    return str(error) if named else f"{shard['tar']}: {error}"


class _Judged:
    """Shows a judge the unmixed images, some series at a time; writes what it sees in them."""

    def __init__(self, judge: Judge | None) -> None:
        self.judge = judge
        self.waiting: list[Examined] = []

    def add(self, found: Examined) -> None:
        self.waiting.append(found)
        if sum(len(waiting.ends) for waiting in self.waiting) >= ENDS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        if self.judge is None or not any(len(found.ends) for found in waiting):
            return
        seen = iter(self.judge(np.concatenate([found.ends for found in waiting])).tolist())
        for found in waiting:
            ends = np.flatnonzero(found.series.intended >= 0)
            found.series.judged[ends] = [next(seen) for _ in ends]
