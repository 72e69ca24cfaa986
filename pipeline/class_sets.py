"""Sets of classes that series mix, by rank, without listing them all."""

import hashlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from semix.data.errors import InputError
from semix.data.formats import MAX_GROUPS
from semix.pipeline.config import MixingConfig

FEISTEL_ROUNDS = 4  # Luby and Rackoff 1988: four make a strong pseudo-random permutation


class ClassSets(Protocol):
    """P ascending sets of k classes each, by rank, without listing them all."""

    def __len__(self) -> int: ...

    def __getitem__(self, rank: int, /) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class AllSets:
    """All sets of `size` classes in lexicographic order."""

    classes: int
    size: int

    @property
    def count(self) -> int:
        """Like `len`, which raises OverflowError from 2^63 on."""
        return math.comb(self.classes, self.size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        return combination(rank, self.classes, self.size)


@dataclass(frozen=True)
class SampledSets:
    """The first `count` sets of a seeded permutation of all: uniform, without repeats."""

    count: int
    population: AllSets
    seed: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        return self.population[permuted(rank, self.population.count, self.seed)]


@dataclass(frozen=True)
class UndrawnPairs:
    """Pairs that are drawn when a build begins, by similarity or by a run; only their number is
    known."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        raise LookupError("these pairs are drawn when a build begins")


@dataclass(frozen=True)
class CountedPairs:
    """A sequence of pairs in which each comes as often as its count says.

    It runs in rounds: each round has every pair whose count is not reached yet, those with the
    largest counts first.

    Args:
        series: first class, second class and count, at least 1, of each pair.
    """

    series: Sequence[tuple[int, int, int]]

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        starts, sizes = self._levels
        level = int(np.searchsorted(starts, rank, side="right")) - 1
        first, second, _ = self._descending[(rank - int(starts[level])) % int(sizes[level])]
        return first, second

    @cached_property
    def _total(self) -> int:
        return sum(count for _, _, count in self.series)

    @cached_property
    def _descending(self) -> list[tuple[int, int, int]]:
        return sorted(self.series, key=lambda pair: -pair[2])

    @cached_property
    def _levels(self) -> tuple[np.ndarray, np.ndarray]:
        """First rank and number of pairs of each run of equal rounds, int64 [L] each."""
        counts, first_pair = np.unique(
            [-count for _, _, count in self._descending], return_index=True
        )
        rounds = -counts[::-1]  # ascending: after so many rounds, pairs end
        sizes = np.append(first_pair[1:], len(self.series))[::-1]
        lengths = np.diff(rounds, prepend=0) * sizes
        return np.cumsum(lengths) - lengths, sizes


def share_series(
    weights: Mapping[tuple[int, int], float], total: int, *, even: float
) -> list[tuple[int, int, int]]:
    """Distribute series over pairs by weight: first class, second class and count, at least 1.

    Counts are rounded by largest remainder; pairs that would get none are left out.

    Args:
        weights: of each pair of classes, not negative, not all 0.
        total: number of series.
        even: share of the series that is distributed evenly, from 0 to 1.
    """
    pairs = sorted(weights)
    values = np.array([weights[pair] for pair in pairs], np.float64)
    shares = total * (even / len(pairs) + (1 - even) * values / values.sum())
    counts = np.floor(shares).astype(np.int64)
    by_remainder = np.argsort(counts - shares, kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    return [(*pair, count) for pair, count in zip(pairs, counts.tolist(), strict=True) if count]


def class_sets(mixing: MixingConfig, names: Sequence[str]) -> ClassSets:
    """The sets of classes under this config.

    Raises:
        InputError: too few classes, a name that is no class, a set named twice, or more sets
            than exist.
    """
    if len(names) < mixing.classes:
        raise InputError("mixing.classes", mixing.classes, f"the data has {len(names)} classes")
    all_sets = AllSets(len(names), mixing.classes)
    pairs = mixing.pairs
    if pairs.kind == "named":
        return _named_sets(pairs.names, names, mixing.classes)
    if pairs.count is None:
        if all_sets.count > MAX_GROUPS:  # and `len` might overflow
            count = f"all {all_sets.count:,} sets of {mixing.classes} of {len(names):,} classes"
            remedy = f"is {count}; a root has at most {MAX_GROUPS:,} series: choose sampled or "
            raise InputError("mixing.pairs.kind", pairs.kind, f"{remedy}similar, with a count")
        return all_sets if pairs.kind == "all" else UndrawnPairs(all_sets.count)
    if pairs.count > all_sets.count:
        raise InputError("mixing.pairs.count", pairs.count, f"there are only {all_sets.count}")
    if pairs.kind == "similar":
        return UndrawnPairs(pairs.count)
    return SampledSets(pairs.count, all_sets, mixing.seed)


def _named_sets(
    named_sets: Sequence[Sequence[str]], names: Sequence[str], size: int
) -> tuple[tuple[int, ...], ...]:
    index = {name: position for position, name in enumerate(names)}
    sets = []
    for members in named_sets:
        text = ", ".join(members)
        for name in members:
            if name not in index:
                remedy = f"{name!r} is no class of the data; known: {', '.join(names[:20])}"
                raise InputError("mixing.pairs.names", text, remedy)
        if len(set(members)) != size or len(members) != size:
            raise InputError("mixing.pairs.names", text, f"name {size} different classes")
        sets.append(tuple(sorted(index[name] for name in members)))
    for classes, times in Counter(sets).items():
        if times > 1:
            text = ", ".join(names[k] for k in classes)
            remedy = "is named more than once; raise mixing.groups_per_pair instead"
            raise InputError("mixing.pairs.names", text, remedy)
    return tuple(sets)


def combination(rank: int, classes: int, size: int) -> tuple[int, ...]:
    """The set at `rank` in lexicographic order among all ascending sets, without listing them.

    Counted from the end and mirrored, the sets are those of the combinatorial number system:
    the largest member m of a set of k adds comb(m, k) to its rank.
    """
    remainder = math.comb(classes, size) - 1 - rank
    members = []
    for k in range(size, 0, -1):
        member = _largest(remainder, k, classes)
        remainder -= math.comb(member, k)
        members.append(classes - 1 - member)
    return tuple(members)


def _largest(rank: int, k: int, below: int) -> int:
    """The largest m < `below` with comb(m, k) <= rank."""
    return bisect_right(range(below), rank, key=lambda m: math.comb(m, k)) - 1


def permuted(rank: int, count: int, seed: int) -> int:
    """The image of `rank` under a seeded permutation of range(count), in constant memory.

    A Feistel network permutes the next even power of two and is applied again while the number is
    outside the range (cycle walking, Black and Rogaway 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = rank >> half, rank & mask
        for round_number in range(FEISTEL_ROUNDS):
            digest = hashlib.sha256(f"{seed}/pairs/{round_number}/{right}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
        rank = left << half | right
        if rank < count:
            return rank
