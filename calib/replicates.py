"""Compare methods over replicates: mean difference, interval, and a test of enough units.

A replicate of a study of mixed images has its own split of the real images, its own small models
trained on it, and its own mixed images. Training seeds and test images are nested in replicates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np

Key = TypeVar("Key")

MIN_UNITS = 3  # two differences hardly tell how much differences vary
LEVEL = 0.95
RESAMPLES = 10_000
ROUNDING_ERROR = 1e-12  # largest difference between values that count as equal
# The evaluation of a seed stores this number of bootstrap resamples, of these measures.
STORED_RESAMPLES, COMPARED_MEASURES = 20, ("accuracy", "ece", "nll", "brier")


class Unit(NamedTuple):
    """Where a value comes from.

    `draw` is None for runs without drawn mixed images, `seed` for an ensemble of all seeds.
    """

    split: int
    draw: int | None
    seed: int | None


# Of each unit one value, or one value per bootstrap resample, in the same order in a split.
UnitValues = Mapping[Unit, Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """One measure of one row compared with that of another, over the units that both have.

    Attributes:
        change: mean of new - old, in the unit of the measure.
        low, high: 95 % interval of the change, from `interval`; None for a single value.
        n: number of independent units in the test.
        over: what these units are, splits or seeds.
        p: two-sided p-value, from `p_value`; None with fewer than three units, or if values do not
            vary.
        p_holm: p, corrected for the number of rows that are tested on this measure.
    """

    change: float
    low: float | None
    high: float | None
    n: int
    over: Literal["splits", "seeds"]
    p: float | None
    p_holm: float | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero, with enough units to trust it."""
        return self._excludes_zero and self.n >= MIN_UNITS

    @property
    def too_few(self) -> str:
        """Why an interval that excludes zero is not trusted: `2 seeds are too few to say`.

        Empty for every other interval.
        """
        if self.is_clear or not self._excludes_zero:
            return ""
        units = f"{self.n} {self.over} are" if self.n > 1 else f"1 {self.over[:-1]} is"
        return f"{units} too few to say"

    @property
    def _excludes_zero(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


def compare(new: UnitValues, old: UnitValues) -> Comparison | None:
    """Compare two rows; None if they share no unit."""
    pair = pair_values(new, old)
    if pair is None:
        return None
    changes = pair[0] - pair[1]
    low, high = interval(changes) or (None, None)
    over: Literal["splits", "seeds"] = "splits" if len(changes) > 1 else "seeds"
    n = len(changes) if over == "splits" else changes.shape[2]
    return Comparison(float(changes.mean()), low, high, n, over, p_value(*pair))


def compare_all(others: Mapping[str, UnitValues], baseline: UnitValues) -> dict[str, Comparison]:
    """Compare each row with the baseline; p_holm is corrected over all of these rows."""
    tests = {name: compare(values, baseline) for name, values in others.items()}
    return with_corrected_p({name: test for name, test in tests.items() if test is not None})


def with_corrected_p(tests: Mapping[Key, Comparison]) -> dict[Key, Comparison]:
    """The same tests with p_holm, which `holm` corrects over all of them."""
    p_values = holm([test.p for test in tests.values()])
    return {
        name: replace(test, p_holm=p)
        for (name, test), p in zip(tests.items(), p_values, strict=True)
    }


def pair_values(new: UnitValues, old: UnitValues) -> tuple[np.ndarray, np.ndarray] | None:
    """Values of two rows as arrays [splits, draws, seeds, resamples], of splits complete in both.

    A row without draws is paired with every draw of the other row. An ensemble of all seeds is
    paired with the mean over the other row's seeds, as one seed. If only one row has bootstrap
    resamples, the values of both are averaged over resamples. None if no split is complete.
    """
    if any(unit.seed is None for unit in (*new, *old)):
        new, old = _mean_over_seeds(new), _mean_over_seeds(old)
    units = [*new, *old]
    draws_in_use = sorted({unit.draw for unit in units if unit.draw is not None})
    draws: Sequence[int | None] = draws_in_use or [None]
    seeds = sorted({u.seed for u in new} & {u.seed for u in old}, key=lambda seed: seed or 0)
    splits = [
        split
        for split in sorted({unit.split for unit in units})
        if all(
            _values_at(x, split, d, k) is not None for x in (new, old) for d in draws for k in seeds
        )
    ]
    if not (splits and seeds):
        return None
    lengths = {len(resamples) for values in (new, old) for resamples in values.values()}
    rows = (new, old)
    if len(lengths) > 1:
        rows = (_mean_over_resamples(new), _mean_over_resamples(old))
    new_values, old_values = (
        np.array([[[_values_at(x, s, d, k) for k in seeds] for d in draws] for s in splits])
        for x in rows
    )
    return new_values, old_values


def interval(changes: np.ndarray, *, resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """95 % percentile interval of the mean change by a hierarchical bootstrap.

    Each resample draws with replacement: splits; within each split its draws of mixed images and
    its training seeds, the same for all draws, because runs on real images alone have no draw; and
    one bootstrap resample of the split's test set. With few splits the interval tends to be too
    narrow; with one split it says nothing about other splits.

    Args:
        changes: [splits, draws, seeds, resamples of the test set].
    Returns:
        None for a single value.

    Source: Davison and Hinkley 1997, section 3.8; Saravanan, Berman and Sober 2020.
    """
    if changes.size == 1:
        return None
    splits, draws, seeds, sets = changes.shape
    rng = np.random.default_rng(0)
    s = rng.integers(splits, size=(resamples, splits, 1, 1))
    d = rng.integers(draws, size=(resamples, splits, draws, 1))
    k = rng.integers(seeds, size=(resamples, splits, 1, seeds))
    r = rng.integers(sets, size=(resamples, splits, 1, 1))
    means = changes[s, d, k, r].mean(axis=(1, 2, 3))
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def p_value(new: np.ndarray, old: np.ndarray) -> float | None:
    """The p-value of a paired t-test over splits, or of Welch's over the seeds of a single split.

    On a split, both rows use the same images, so they are paired. Two methods trained with one seed
    share little more than initial weights, so that pairing them would only cost degrees of freedom.

    Args:
        new, old: from `pair_values`.
    """
    from scipy.stats import ttest_ind, ttest_rel

    new_values, old_values = (
        _means_along(values, axis=0 if len(new) > 1 else 2) for values in (new, old)
    )
    if len(new_values) < MIN_UNITS:
        return None
    varying = [new_values - old_values] if len(new) > 1 else [new_values, old_values]
    if all(np.ptp(values) <= ROUNDING_ERROR for values in varying):
        return None
    if len(new) > 1:
        test = ttest_rel(new_values, old_values)
    else:
        test = ttest_ind(new_values, old_values, equal_var=False)
    p = float(test.pvalue)
    return p if math.isfinite(p) else None


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p-values, so that they bound the probability of any false positive among all tests.

    The smallest of m p-values is multiplied by m, the next one by m - 1, and so on; a corrected
    p-value is at least the one before it. None stands for no test and is not counted.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    tests = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected_p: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        corrected_p[index] = largest
    return corrected_p


def centre_resamples(value: float, resamples: Sequence[float]) -> list[float]:
    """Shift the values on bootstrap resamples so that their mean is the value itself.

    A binned error is larger on images drawn with replacement, by more where the error is small.
    This bias is removed, as another test set would not have it.
    """
    if not resamples:
        return [value]
    mean = math.fsum(resamples) / len(resamples)
    return [value + each - mean for each in resamples]


def _values_at(
    values: UnitValues, split: int, draw: int | None, seed: int | None
) -> Sequence[float] | None:
    value = values.get(Unit(split, draw, seed))
    return values.get(Unit(split, None, seed)) if value is None else value


def _mean_over_seeds(values: UnitValues) -> UnitValues:
    by_replicate: dict[Unit, list[Sequence[float]]] = {}
    for unit, resamples in values.items():
        by_replicate.setdefault(unit._replace(seed=None), []).append(resamples)
    return {
        unit: [math.fsum(each) / len(each) for each in zip(*seeds, strict=True)]
        for unit, seeds in by_replicate.items()
    }


def _mean_over_resamples(values: UnitValues) -> UnitValues:
    return {unit: [math.fsum(resamples) / len(resamples)] for unit, resamples in values.items()}


def _means_along(values: np.ndarray, *, axis: int) -> np.ndarray:
    other_axes = tuple(other for other in range(values.ndim) if other != axis)
    means: np.ndarray = values.mean(axis=other_axes)
    return means
