"""Differences between methods over replicates: an interval, and a test if there are enough units.

A study of mixed images replicates the treatment: another split of the real images, other small
models, other mixed images. Training seeds and test images are nested in it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np

Name = TypeVar("Name")

MIN_UNITS = 3  # two differences say next to nothing about their spread
LEVEL = 0.95
RESAMPLES = 10_000
ROUNDING = 1e-12  # between values that are equal except for the last digits
# A seed's evaluation stores so many bootstrap resamples of these measures.
STORED_RESAMPLES, COMPARED_MEASURES = 20, ("accuracy", "ece", "nll", "brier")


class Unit(NamedTuple):
    """Where a value comes from; `draw` is None for runs that use no drawn mixed images."""

    split: int
    draw: int | None
    seed: int


# One value per unit, or one per bootstrap resample, in the same order for all units of a split.
UnitValues = Mapping[Unit, Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """One measure of a row against another, over the units that both have.

    Attributes:
        change: mean of new - old, in the unit of the measure.
        low, high: 95 % interval of the change by `interval`; None for a single value.
        n: number of independent units in the test; `over` says whether they are splits or seeds.
        p: two-sided, from `p_value`; None below three units, or if nothing varies.
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
        """Whether the interval excludes zero and has enough units to be trusted."""
        return self._excludes_zero and self.n >= MIN_UNITS

    @property
    def too_few(self) -> str:
        """Why an interval that excludes zero is not trusted; empty for every other.

        `2 seeds are too few to say`.
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
    pair = paired(new, old)
    if pair is None:
        return None
    changes = pair[0] - pair[1]
    low, high = interval(changes) or (None, None)
    over: Literal["splits", "seeds"] = "splits" if len(changes) > 1 else "seeds"
    n = len(changes) if over == "splits" else changes.shape[2]
    return Comparison(float(changes.mean()), low, high, n, over, p_value(*pair))


def compare_all(others: Mapping[str, UnitValues], baseline: UnitValues) -> dict[str, Comparison]:
    """Compare each row with the baseline, with p corrected over all of them."""
    tests = {name: compare(values, baseline) for name, values in others.items()}
    return corrected({name: test for name, test in tests.items() if test is not None})


def corrected(tests: Mapping[Name, Comparison]) -> dict[Name, Comparison]:
    """The tests with p corrected over all of them by `holm`."""
    p_values = holm([test.p for test in tests.values()])
    return {
        name: replace(test, p_holm=p)
        for (name, test), p in zip(tests.items(), p_values, strict=True)
    }


def paired(new: UnitValues, old: UnitValues) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as [splits, draws, seeds, test sets], of the splits in which neither lacks a unit.

    A row without draws is paired with every draw of the other. If only one of them has bootstrap
    resamples, both are reduced to their means.
    """
    units = [*new, *old]
    known = sorted({unit.draw for unit in units if unit.draw is not None})
    draws: Sequence[int | None] = known or [None]
    seeds = sorted({u.seed for u in new} & {u.seed for u in old})
    splits = [
        split
        for split in sorted({unit.split for unit in units})
        if all(_at(x, split, d, k) is not None for x in (new, old) for d in draws for k in seeds)
    ]
    if not (splits and seeds):
        return None
    lengths = {len(at_unit) for each in (new, old) for at_unit in each.values()}
    both = (new, old) if len(lengths) == 1 else (_averaged(new), _averaged(old))
    ours, theirs = (
        np.array([[[_at(x, s, d, k) for k in seeds] for d in draws] for s in splits]) for x in both
    )
    return ours, theirs


def interval(changes: np.ndarray, *, resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """95 % percentile interval of the mean change by a hierarchical bootstrap.

    Splits are drawn with replacement, and within each split its draws of mixed images, its
    training seeds (shared by its draws, as a run without mixed images has no draw), and one
    bootstrap resample of its test set. With few splits the interval tends to be too narrow; with
    one split it says nothing about others.

    Args:
        changes: [splits, draws, seeds, test sets].
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
    """Paired t over means of splits, which share their images; Welch's over the seeds of one split.

    Two methods trained from one seed share little beyond their initial weights, so that pairing
    them would only cost degrees of freedom.

    Args:
        new, old: from `paired`.
    """
    from scipy.stats import ttest_ind, ttest_rel

    ours, theirs = (_means(values, axis=0 if len(new) > 1 else 2) for values in (new, old))
    if len(ours) < MIN_UNITS:
        return None
    varying = [ours - theirs] if len(new) > 1 else [ours, theirs]
    if all(np.ptp(values) <= ROUNDING for values in varying):
        return None
    test = ttest_rel(ours, theirs) if len(new) > 1 else ttest_ind(ours, theirs, equal_var=False)
    p = float(test.pvalue)
    return p if math.isfinite(p) else None


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrected p-values, which bound the chance of any false positive over all tests.

    The smallest of m is multiplied by m, the next by m - 1, and none falls below one before it.
    None means no test and is not counted.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    tests = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    higher: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for done, (p, index) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - done) * p))
        higher[index] = largest
    return higher


def centred(value: float, resamples: Sequence[float]) -> list[float]:
    """A value on bootstrap resamples, shifted so that their mean is the value itself.

    A binned error is larger on a set drawn with replacement, and the more so the smaller it is;
    that bias is not part of what another test set would change.
    """
    if not resamples:
        return [value]
    mean = math.fsum(resamples) / len(resamples)
    return [value + each - mean for each in resamples]


def _at(values: UnitValues, split: int, draw: int | None, seed: int) -> Sequence[float] | None:
    value = values.get(Unit(split, draw, seed))
    return values.get(Unit(split, None, seed)) if value is None else value


def _averaged(values: UnitValues) -> UnitValues:
    return {unit: [math.fsum(resamples) / len(resamples)] for unit, resamples in values.items()}


def _means(values: np.ndarray, *, axis: int) -> np.ndarray:
    rest = tuple(other for other in range(values.ndim) if other != axis)
    means: np.ndarray = values.mean(axis=rest)
    return means
