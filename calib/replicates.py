"""Differences between methods over replicates: an interval first, and a test where n allows.

What a study of mixed images repeats is the treatment: another split of the real images, other
small models, other mixed images. Training seeds are nested in that, and so are test images.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np

Name = TypeVar("Name")

FEWEST = 3  # units; two differences say next to nothing about their spread
LEVEL = 0.95
RESAMPLES = 10_000
ROUNDING = 1e-12  # between values that are equal but for the last digits
# Of so many test sets drawn anew a seed's evaluation keeps these measures.
DRAWN, COMPARED = 20, ("accuracy", "ece", "nll", "brier")


class Unit(NamedTuple):
    """Where a value comes from; `draw` is None for runs that no draw of mixed images changes."""

    split: int
    draw: int | None
    seed: int


# One value a unit; or one for each test set drawn anew, in the same order for all units of a split.
Drawn = Mapping[Unit, Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """One measure of a row against another, over the units that both have.

    Attributes:
        change: mean of the new - the old, in the unit of the measure.
        low, high: 95 % interval of the change by `interval`; None where there is one value alone.
        n: independent units that the test counts, which are `over` splits or seeds.
        p: two-sided, of `p_value`; None below three units, or where nothing varies.
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
        """Whether the interval leaves zero out, and is of units enough to be believed."""
        return self._leaves_zero_out and self.n >= FEWEST

    @property
    def too_few(self) -> str:
        """Why an interval that leaves zero out is not believed; empty for every other.

        `2 seeds are too few to say`.
        """
        if self.is_clear or not self._leaves_zero_out:
            return ""
        units = f"{self.n} {self.over} are" if self.n > 1 else f"1 {self.over[:-1]} is"
        return f"{units} too few to say"

    @property
    def _leaves_zero_out(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


def compare(new: Drawn, old: Drawn) -> Comparison | None:
    """None without a unit that both have."""
    pair = paired(new, old)
    if pair is None:
        return None
    changes = pair[0] - pair[1]
    low, high = interval(changes) or (None, None)
    over: Literal["splits", "seeds"] = "splits" if len(changes) > 1 else "seeds"
    n = len(changes) if over == "splits" else changes.shape[2]
    return Comparison(float(changes.mean()), low, high, n, over, p_value(*pair))


def compare_all(others: Mapping[str, Drawn], baseline: Drawn) -> dict[str, Comparison]:
    """Each against the baseline by `compare`, with p corrected over all of them."""
    found = {name: compare(values, baseline) for name, values in others.items()}
    return corrected({name: test for name, test in found.items() if test is not None})


def corrected(tests: Mapping[Name, Comparison]) -> dict[Name, Comparison]:
    """With p corrected over all of them, by `holm`."""
    p_values = holm([test.p for test in tests.values()])
    return {
        name: replace(test, p_holm=p)
        for (name, test), p in zip(tests.items(), p_values, strict=True)
    }


def paired(new: Drawn, old: Drawn) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as [splits, draws, seeds, test sets], of the splits in which neither lacks a unit.

    A row without draws stands beside every draw of the other. Where only one of them has test
    sets drawn anew, both are given by their means.
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
    lengths = {len(values) for each in (new, old) for values in each.values()}
    given = (new, old) if len(lengths) == 1 else (_averaged(new), _averaged(old))
    ours, theirs = (
        np.array([[[_at(x, s, d, k) for k in seeds] for d in draws] for s in splits]) for x in given
    )
    return ours, theirs


def interval(changes: np.ndarray, *, resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """95 % percentile interval of the mean change by a hierarchical bootstrap.

    Splits are drawn with replacement, in each of them its draws of mixed images, its training
    seeds (which its draws share, as a run without mixed images has no draw), and one of its test
    sets drawn anew. Between few splits the interval is rather too narrow than too wide; of one
    split it says nothing about others.

    Args:
        changes: [splits, draws, seeds, test sets].
    Returns:
        None for one value alone.

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

    Two methods trained from one seed share little beyond their first weights, so that pairing
    them would only cost degrees of freedom.

    Args:
        new, old: as of `paired`.
    """
    from scipy.stats import ttest_ind, ttest_rel

    ours, theirs = (_means(values, axis=0 if len(new) > 1 else 2) for values in (new, old))
    if len(ours) < FEWEST:
        return None
    varying = [ours - theirs] if len(new) > 1 else [ours, theirs]
    if all(np.ptp(values) <= ROUNDING for values in varying):
        return None
    test = ttest_rel(ours, theirs) if len(new) > 1 else ttest_ind(ours, theirs, equal_var=False)
    p = float(test.pvalue)
    return p if math.isfinite(p) else None


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrected p-values, so that the chance of any false find over all tests stays below each.

    The smallest of m is multiplied by m, the next by m - 1, and none falls below one before it.
    None is no test and counts for nothing.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    tests = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    higher: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for done, (p, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - done) * p))
        higher[place] = largest
    return higher


def centred(value: float, drawn: Sequence[float]) -> list[float]:
    """A value on test sets drawn anew, moved so that their mean is the value itself.

    A binned error is larger on a set drawn with replacement, and the more so the smaller it is;
    that bias is no part of what another test set would change.
    """
    if not drawn:
        return [value]
    mean = math.fsum(drawn) / len(drawn)
    return [value + each - mean for each in drawn]


def _at(values: Drawn, split: int, draw: int | None, seed: int) -> Sequence[float] | None:
    found = values.get(Unit(split, draw, seed))
    return values.get(Unit(split, None, seed)) if found is None else found


def _averaged(values: Drawn) -> Drawn:
    return {unit: [math.fsum(drawn) / len(drawn)] for unit, drawn in values.items()}


def _means(values: np.ndarray, *, axis: int) -> np.ndarray:
    rest = tuple(other for other in range(values.ndim) if other != axis)
    means: np.ndarray = values.mean(axis=rest)
    return means
