"""Pictures that look alike in different series, without comparing all with all."""

from dataclasses import dataclass

import numpy as np

# Noise of 2 levels in every pixel changes 6 of 128 bits or fewer in 997 of 1,000 pictures.
NEAR = 6
# Levels of 255 in any part of a coarse thumbnail. Of 580,000 pairs of 1,080 handwritten digits,
# whose pictures are as alike as any, none is within 12.
ALIKE = 6
BANDS = 8  # of 16 bits; pictures that differ in at most 6 bits share 2 of them or more
NEIGHBOURS = 16  # compared in each order; a series fills some with its own images


@dataclass(frozen=True)
class Duplicates:
    """Series with a picture like one of an earlier series.

    Attributes:
        rows: int64 [N], ascending, the later series of each pair.
        of: int64 [N], the earliest series found like it.
        same: bool [N], whether a picture has the same pixels.
    """

    rows: np.ndarray
    of: np.ndarray
    same: np.ndarray


def find_duplicates(
    hashes: np.ndarray, coarse: np.ndarray, exact: np.ndarray, *, usable: np.ndarray
) -> Duplicates:
    """Compare each picture with those next to it in several orders of their hashes.

    Equal pixels are always found. Hashes that differ in at most NEAR bits are found unless, in
    each of the orders, more than NEIGHBOURS others stand between them: the cost grows with
    N log N, and the answer may miss some of many.

    Args:
        hashes: uint64 [G, A, 2]; coarse: uint8 [G, A, 19]; exact: uint64 [G, A].
        usable: bool [G, A], images to compare; flat ones are alike and say nothing.
    """
    series = np.nonzero(usable)[0]  # [N], of each image compared
    hashes, coarse, exact = hashes[usable], coarse[usable], exact[usable]
    both = np.concatenate([_equal(exact), *(_near(hashes, coarse, band) for band in range(BANDS))])
    same = exact[both[:, 0]] == exact[both[:, 1]]
    rows = np.sort(series[both], axis=1)  # [P, 2]
    other = rows[:, 0] != rows[:, 1]
    return _first_of_each(rows[other], same[other])


def _equal(exact: np.ndarray) -> np.ndarray:
    """Each image that equals an earlier one, with the earliest: [P, 2]."""
    _, first, inverse = np.unique(exact, return_index=True, return_inverse=True)
    later = np.flatnonzero(first[inverse] != np.arange(len(exact)))
    return np.stack([first[inverse[later]], later], axis=1)


def _near(hashes: np.ndarray, coarse: np.ndarray, band: int) -> np.ndarray:
    """Image pairs alike among neighbours once sorted by the hash from one band on: [P, 2]."""
    octets = np.roll(hashes.view(np.uint8), -2 * band, axis=1)
    high, low = np.ascontiguousarray(octets).view(">u8").T
    order = np.lexsort((low, high))
    found = []
    for shift in range(1, min(NEIGHBOURS, len(order) - 1) + 1):
        one, two = order[:-shift], order[shift:]
        bits = np.bitwise_count(hashes[one] ^ hashes[two]).sum(1)
        close = np.flatnonzero(bits <= NEAR)
        one, two = one[close], two[close]
        gap = np.abs(coarse[one].astype(np.int16) - coarse[two]).max(1)
        found.append(np.stack([one, two], axis=1)[gap <= ALIKE])
    return np.concatenate(found) if found else np.empty((0, 2), dtype=np.int64)


def _first_of_each(pairs: np.ndarray, same: np.ndarray) -> Duplicates:
    """For each later series of [P, 2] the earliest one like it."""
    order = np.lexsort((pairs[:, 0], ~same, pairs[:, 1]))  # equal pixels say more than likeness
    pairs, same = pairs[order], same[order]
    rows, start = np.unique(pairs[:, 1], return_index=True)
    return Duplicates(rows, pairs[start, 0], same[start])
