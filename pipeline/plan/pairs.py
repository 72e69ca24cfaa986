"""Which classes are mixed: sets of classes by rank, without listing them where there are many."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from data.errors import InputError
from pipeline.config import MixingConfig

FEISTEL_ROUNDS = 4  # Luby and Rackoff 1988: four make a strong pseudo-random permutation


class ClassSets(Protocol):
    """P sets of k classes each, ascending."""

    def __len__(self) -> int: ...

    def __getitem__(self, rank: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class All:
    """All sets in lexicographic order."""

    classes: int
    size: int

    def __len__(self) -> int:
        return math.comb(self.classes, self.size)

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        return combination(rank, self.classes, self.size)


@dataclass(frozen=True)
class Sampled:
    """The first `count` sets of a seeded permutation of all: uniform, without repeats."""

    count: int
    population: All
    seed: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        return self.population[permuted(rank, len(self.population), self.seed)]


@dataclass(frozen=True)
class Listed:
    """The sets that the config names."""

    sets: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        return self.sets[rank]


@dataclass(frozen=True)
class Similar:
    """Pairs drawn by similarity; `sets` is None until the prototypes are measured."""

    count: int
    sets: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        if self.sets is None:
            raise ValueError("similar pairs are drawn from prototypes, which are not measured yet")
        return self.sets[rank]


def class_sets(mixing: MixingConfig, names: Sequence[str]) -> ClassSets:
    """The sets that the config asks for.

    Raises:
        InputError: too few classes, a name that is no class, a set named twice, or more sets
            than there are.
    """
    if len(names) < mixing.classes:
        raise InputError("mixing.classes", mixing.classes, f"the data has {len(names)} classes")
    everything = All(len(names), mixing.classes)
    pairs = mixing.pairs
    if pairs.kind == "named":
        return Listed(_named(pairs.names, names, mixing.classes))
    if pairs.count is None:
        return everything
    if pairs.count > len(everything):
        raise InputError("mixing.pairs.count", pairs.count, f"there are only {len(everything)}")
    if pairs.kind == "similar":
        return Similar(pairs.count)
    return Sampled(pairs.count, everything, mixing.seed)


def _named(
    wanted: Sequence[Sequence[str]], names: Sequence[str], size: int
) -> tuple[tuple[int, ...], ...]:
    index = {name: position for position, name in enumerate(names)}
    sets = []
    for members in wanted:
        shown = ", ".join(members)
        for name in members:
            if name not in index:
                remedy = f"{name!r} is no class of the data; known: {', '.join(names[:20])}"
                raise InputError("mixing.pairs.names", shown, remedy)
        if len(set(members)) != size or len(members) != size:
            raise InputError("mixing.pairs.names", shown, f"name {size} different classes")
        sets.append(tuple(sorted(index[name] for name in members)))
    for found, times in Counter(sets).items():
        if times > 1:
            shown = ", ".join(names[k] for k in found)
            remedy = "is named more than once; raise mixing.groups_per_pair instead"
            raise InputError("mixing.pairs.names", shown, remedy)
    return tuple(sets)


def combination(rank: int, classes: int, size: int) -> tuple[int, ...]:
    """The set at `rank` among all ascending sets in lexicographic order, without listing them.

    Counted from the end and mirrored, the sets are those of the combinatorial number system:
    the largest member m of a set of k adds comb(m, k) to its rank.
    """
    left = math.comb(classes, size) - 1 - rank
    members = []
    for k in range(size, 0, -1):
        member = _largest(left, k, classes)
        left -= math.comb(member, k)
        members.append(classes - 1 - member)
    return tuple(members)


def _largest(rank: int, k: int, below: int) -> int:
    """The largest m < `below` with comb(m, k) <= rank, by bisection."""
    low, high = k - 1, below
    while high - low > 1:
        middle = (low + high) // 2
        if math.comb(middle, k) <= rank:
            low = middle
        else:
            high = middle
    return low


def permuted(rank: int, count: int, seed: int) -> int:
    """Where `rank` goes in a seeded permutation of range(count), in constant memory.

    A Feistel network permutes the next even power of two; numbers outside the range are walked
    on until they come back (Black and Rogaway 2002, cycle walking).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = rank >> half, rank & mask
        for turn in range(FEISTEL_ROUNDS):
            digest = hashlib.sha256(f"{seed}/pairs/{turn}/{right}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
        rank = left << half | right
        if rank < count:
            return rank
