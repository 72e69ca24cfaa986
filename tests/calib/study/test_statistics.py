"""Ranks, paired tests and Holm's correction against hand computation."""

import pytest

from calib.study.statistics import compare, holm, ranks


def test_the_paired_test_is_student_s_over_the_differences():
    # Differences -1, -2, -3: mean -2, deviation 1, so t = -2 sqrt(3) with two degrees of freedom,
    # for which the two-sided p is 1 - |t| / sqrt(t^2 + 2) = 1 - sqrt(12 / 14).
    found = compare(
        {0: 4.0, 1: 3.0, 2: 5.0, 9: 0.0}, {0: 5.0, 1: 5.0, 2: 8.0}, higher_is_better=False
    )
    assert found is not None
    assert (found.change, found.better, found.shared) == (-2, 3, 3)
    assert found.p == pytest.approx(1 - (12 / 14) ** 0.5)


def test_better_follows_the_measure_and_ties_are_not_better():
    new, old = {0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 1.0, 2: 4.0}
    for higher_is_better in (True, False):
        found = compare(new, old, higher_is_better=higher_is_better)
        assert found is not None
        assert found.better == 1


def test_without_three_shared_seeds_or_any_spread_there_is_no_p():
    def p(*changes):
        new = {seed: 1.0 + change for seed, change in enumerate(changes)}
        found = compare(new, dict.fromkeys(new, 1.0), higher_is_better=True)
        assert found is not None
        return found.p

    assert p(0.5, 0.25) is None
    assert p(0.5, 0.5, 0.5) is None
    assert p(0.5, 0.25, 0.125) is not None
    assert compare({0: 1.0}, {1: 1.0}, higher_is_better=True) is None


def test_holm_multiplies_by_what_is_left_and_never_falls():
    # Sorted: 0.01 x 4, 0.02 x 3, 0.025 x 2 = 0.05 but not below 0.06, 0.7 x 1.
    assert holm([0.025, None, 0.01, 0.7, 0.02]) == pytest.approx([0.06, None, 0.04, 0.7, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([None]) == [None]


def test_equal_values_share_the_mean_of_their_ranks():
    assert ranks([0.3, 0.1, 0.3, 0.2]) == [3.5, 1, 3.5, 2]
