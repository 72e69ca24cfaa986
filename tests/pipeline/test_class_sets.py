"""Pairs of classes that come as often as their weights say."""

from collections import Counter
from itertools import combinations

import pytest

from semix.pipeline.class_sets import CountedPairs, share_series

PAIRS = list(combinations(range(4), 2))


def test_each_pair_comes_as_often_as_its_count_and_no_round_repeats_one():
    counts = (2, 5, 1, 3, 3, 1)
    series = [(*pair, count) for pair, count in zip(PAIRS, counts, strict=True)]
    pairs = CountedPairs(series)
    listed = [pairs[rank] for rank in range(len(pairs))]
    assert Counter(listed) == dict(zip(PAIRS, counts, strict=True))
    rounds = [
        [pair for pair, count in zip(PAIRS, counts, strict=True) if count > r] for r in range(5)
    ]
    start = 0
    for expected in rounds:
        assert sorted(listed[start : start + len(expected)]) == expected
        start += len(expected)


@pytest.mark.parametrize("even", [0.0, 0.25, 1.0])
def test_series_are_shared_by_weight_and_add_up(even):
    weights = dict(zip(PAIRS, (0.0, 1.0, 2.0, 3.0, 4.0, 0.003), strict=True))
    series = share_series(weights, 101, even=even)
    counts = {(first, second): count for first, second, count in series}
    assert sum(counts.values()) == 101
    assert all(count >= 1 for count in counts.values())
    for pair, weight in weights.items():
        share = 101 * (even / 6 + (1 - even) * weight / sum(weights.values()))
        assert abs(counts.get(pair, 0) - share) < 1
    assert ((0, 1) in counts) == (even > 0)
