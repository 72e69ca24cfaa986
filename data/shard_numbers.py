"""Shard numbers, ascending: a million of them in four megabytes."""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import overload

import numpy as np

AT_ONCE = 10_000  # numbers that become Python's while one iterates
_NONE = np.empty(0, np.int32)


class ShardNumbers(Sequence[int]):
    """Numbers without repeats, ascending; equal to any list, range or set of the same numbers.

    `in` and slices are cheap; `&`, `|` and `-` take any numbers.
    """

    __hash__ = None  # type: ignore[assignment]  # a set of the same numbers has another one

    def __init__(self, numbers: "Iterable[int] | np.ndarray" = ()) -> None:
        if not isinstance(numbers, np.ndarray):
            numbers = np.fromiter(numbers, dtype=np.int32)
        self.array = np.unique(numbers.astype(np.int32, copy=False))

    @classmethod
    def spans(cls, spans: Iterable[tuple[int, int]]) -> "ShardNumbers":
        """All numbers from a start up to, not including, its end."""
        runs = [np.arange(start, end, dtype=np.int32) for start, end in spans]
        return _of(runs[0]) if len(runs) == 1 else cls(np.concatenate([_NONE, *runs]))

    @classmethod
    def joined(cls, arrays: Iterable[np.ndarray]) -> "ShardNumbers":
        """Of int32 arrays that ascend, each from where the one before it ends."""
        return _of(np.concatenate([_NONE, *arrays]))

    def runs(self) -> Iterator[tuple[int, int]]:
        """First and last of each stretch without a gap."""
        if not len(self):
            return
        breaks = np.flatnonzero(np.diff(self.array) > 1)
        firsts = self.array[np.concatenate([[0], breaks + 1])]
        lasts = self.array[np.concatenate([breaks, [len(self) - 1]])]
        yield from zip(firsts.tolist(), lasts.tolist(), strict=True)

    def between(self, start: int, end: int) -> "ShardNumbers":
        """Those from `start` up to, not including, `end`."""
        first, last = np.searchsorted(self.array, [start, max(start, end)])
        return _of(self.array[first:last])

    def __len__(self) -> int:
        return len(self.array)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int | np.integer):
            return False
        place = int(np.searchsorted(self.array, number))
        return place < len(self.array) and bool(self.array[place] == number)

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self.array), AT_ONCE):
            yield from self.array[start : start + AT_ONCE].tolist()

    def __reversed__(self) -> Iterator[int]:
        for end in range(len(self.array), 0, -AT_ONCE):
            yield from reversed(self.array[max(0, end - AT_ONCE) : end].tolist())

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "ShardNumbers": ...
    def __getitem__(self, place: int | slice) -> "int | ShardNumbers":
        if isinstance(place, slice):
            if (place.step or 1) < 0:
                raise ValueError("these numbers ascend; walk them with reversed()")
            return _of(self.array[place])
        return int(self.array[place])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ShardNumbers):
            return np.array_equal(self.array, other.array)
        if isinstance(other, Set):
            return len(self) == len(other) and all(number in other for number in self)
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(
                ours == theirs for ours, theirs in zip(self, other, strict=True)
            )
        return NotImplemented

    def __and__(self, other: Iterable[int]) -> "ShardNumbers":
        return _of(np.intersect1d(self.array, _array(other), assume_unique=True))

    def __or__(self, other: Iterable[int]) -> "ShardNumbers":
        return _of(np.union1d(self.array, _array(other)))

    def __sub__(self, other: Iterable[int]) -> "ShardNumbers":
        return _of(np.setdiff1d(self.array, _array(other), assume_unique=True))

    def __repr__(self) -> str:
        from data.ranges import format_ranges

        return f"ShardNumbers({format_ranges(self)})"


def _array(numbers: Iterable[int]) -> np.ndarray:
    return numbers.array if isinstance(numbers, ShardNumbers) else ShardNumbers(numbers).array


def _of(array: np.ndarray) -> ShardNumbers:
    """Of an array that ascends already."""
    found = ShardNumbers.__new__(ShardNumbers)
    found.array = array
    return found
