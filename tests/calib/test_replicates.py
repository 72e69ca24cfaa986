"""Comparisons over replicates: hand values, what pairs with what, and intervals that cover."""

import numpy as np
import pytest
from scipy.stats import t as student

from semix.calib.replicates import (
    Unit,
    centre_resamples,
    compare,
    compare_all,
    holm,
    interval,
    p_value,
    pair_values,
)


def seeds(*values: float) -> dict[Unit, list[float]]:
    """One value per seed, of one split."""
    return {Unit(0, None, seed): [value] for seed, value in enumerate(values)}


def splits(*values: float) -> dict[Unit, list[float]]:
    return {Unit(split, None, 0): [value] for split, value in enumerate(values)}


def test_seeds_of_one_split_are_tested_by_welch():
    # Means 2 and 5, variances 1 and 4: t = -3 / sqrt(5/3), by Welch with 2.941 degrees of freedom.
    comparison = compare(seeds(1.0, 2.0, 3.0), seeds(3.0, 5.0, 7.0))
    assert comparison is not None
    assert (comparison.change, comparison.n, comparison.over) == (-3, 3, "seeds")
    assert comparison.p == pytest.approx(2 * student.sf(3 / (5 / 3) ** 0.5, 2.9412), abs=1e-4)


def test_splits_are_paired():
    # Differences -1, -2, -3: mean -2, deviation 1, so t = -2 sqrt(3) with two degrees of freedom,
    # for which the two-sided p is 1 - |t| / sqrt(t^2 + 2) = 1 - sqrt(12 / 14).
    comparison = compare(splits(4.0, 3.0, 5.0), splits(5.0, 5.0, 8.0))
    assert comparison is not None
    assert (comparison.change, comparison.n, comparison.over) == (-2, 3, "splits")
    assert comparison.p == pytest.approx(1 - (12 / 14) ** 0.5)


def test_only_what_both_have_is_compared():
    new = {**splits(4.0, 3.0, 5.0), Unit(9, None, 0): [100.0], Unit(0, None, 1): [100.0]}
    comparison = compare(new, splits(5.0, 5.0, 8.0))
    assert comparison is not None
    assert (comparison.change, comparison.n) == (-2, 3)
    assert compare(seeds(1.0), {Unit(0, None, 7): [1.0]}) is None
    assert compare(splits(1.0), {Unit(3, None, 0): [1.0]}) is None


def test_a_run_without_mixed_images_stands_beside_every_draw():
    new = {Unit(s, d, 0): [10.0 * s + d] for s in (0, 1) for d in (4, 5)}
    old = {Unit(s, None, 0): [10.0 * s] for s in (0, 1)}
    both = pair_values(new, old)
    assert both is not None
    assert (both[0] - both[1]).tolist() == [[[[4.0]], [[5.0]]]] * 2
    del new[0, 5, 0]  # a split that lacks a run is left out
    both = pair_values(new, old)
    assert both is not None
    assert both[0].tolist() == [[[[14.0]], [[15.0]]]]


def test_an_ensemble_stands_beside_the_mean_of_the_seeds():
    new = {Unit(split, None, None): [1.0 + split, 2.0 + split] for split in range(3)}
    old = {Unit(s, None, seed): [4.0 + seed, 6.0 + seed] for s in range(3) for seed in (0, 1)}
    both = pair_values(new, old)
    assert both is not None
    assert both[0].shape == (3, 1, 1, 2)
    assert both[1][0].ravel().tolist() == [4.5, 6.5]
    comparison = compare(new, old)
    assert comparison is not None
    assert (comparison.n, comparison.over) == (3, "splits")
    of_one_split = compare({Unit(0, None, None): [1.0, 2.0]}, old)
    assert of_one_split is not None
    assert of_one_split.too_few == "1 seed is too few to say"  # two seeds make one ensemble


def test_bootstrap_resamples_pair_where_both_have_them():
    new, old = {Unit(0, None, 0): [1.0, 3.0]}, {Unit(0, None, 0): [0.5, 1.5]}
    both = pair_values(new, old)
    assert both is not None
    assert (both[0] - both[1]).ravel().tolist() == [0.5, 1.5]
    both = pair_values(new, {Unit(0, None, 0): [0.5]})
    assert both is not None
    assert (both[0] - both[1]).ravel().tolist() == [1.5]


def test_an_interval_of_two_seeds_reaches_from_one_to_the_other():
    assert interval(np.array([-2.0, -1.0]).reshape(1, 1, 2, 1)) == (-2, -1)
    assert interval(np.array([[[[5.0]]]])) is None
    change = compare(seeds(1.0, 1.0), seeds(3.0, 2.0))
    assert change is not None
    assert (change.low, change.high, change.p, change.is_clear) == (-2, -1, None, False)


@pytest.mark.parametrize("level", range(4))
def test_every_level_widens_the_interval(level: int):
    changes = np.zeros([4, 4, 4, 4])
    changes += np.arange(4.0).reshape([4 if axis == level else 1 for axis in range(4)])
    low, high = interval(changes) or (0.0, 0.0)
    assert low < changes.mean() < high
    # The mean of four resampled values of 0 to 3 has deviation sqrt(1.25 / 4). In each of four
    # splits, four draws and four seeds are resampled, and one of four test sets is taken.
    deviation = {0: 1.25 / 4, 1: 1.25 / 16, 2: 1.25 / 16, 3: 1.25 / 4}[level] ** 0.5
    assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.1)


def test_intervals_of_many_splits_cover_the_truth_about_as_often_as_they_say():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        changes = rng.normal(size=(20, 1, 1, 1)) + 0.5 * rng.normal(size=(20, 3, 3, 1))
        low, high = interval(changes, resamples=500) or (0.0, 0.0)
        covered += low <= 0 <= high
    assert 0.89 <= covered / 200 <= 0.99


def test_nothing_that_varies_or_too_few_is_no_test():
    values = np.full([3, 1, 1, 1], 0.1 + 0.2)
    assert p_value(values, np.full([3, 1, 1, 1], 0.3)) is None
    assert compare(seeds(1.0, 2.0), seeds(2.0, 4.0)).p is None
    assert compare(splits(1.0, 2.0), splits(2.0, 4.0)).p is None
    assert compare(splits(1.0, 2.0, 3.0), splits(2.0, 4.0, 5.0)).p is not None


def test_all_rows_of_a_measure_are_corrected_together():
    base = splits(5.0, 5.0, 8.0)
    rows = compare_all({"a": splits(4.0, 3.0, 5.0), "b": splits(4.0, 3.0, 5.0), "c": {}}, base)
    assert set(rows) == {"a", "b"}
    assert rows["a"].p_holm == pytest.approx(2 * rows["a"].p)


def test_holm_multiplies_by_what_is_left_and_never_falls():
    # Sorted: 0.01 x 4, 0.02 x 3, 0.025 x 2 = 0.05 but not below 0.06, 0.7 x 1.
    assert holm([0.025, None, 0.01, 0.7, 0.02]) == pytest.approx([0.06, None, 0.04, 0.7, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([None]) == [None]


def test_resampled_values_are_centred_on_the_value_itself():
    assert centre_resamples(2.0, [2.5, 3.0, 3.5]) == [1.5, 2.0, 2.5]
    assert centre_resamples(2.0, []) == [2.0]
