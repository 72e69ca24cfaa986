"""Methods against a baseline: ranks, paired tests over seeds, Holm's correction."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEWEST = 3  # shared seeds; two differences say next to nothing about their spread


@dataclass(frozen=True)
class Comparison:
    """One measure of a method against the baseline, over the seeds that both have.

    Attributes:
        change: mean of method - baseline, in the unit of the measure.
        better: seeds on which the method is strictly better.
        shared: seeds that both have.
        p: of the two-sided paired t-test; None below three shared seeds, or where every
            difference is the same.
        p_holm: p, corrected for the number of methods that are tested on this measure.
    """

    change: float
    better: int
    shared: int
    p: float | None
    p_holm: float | None = None


def compare(
    new: Mapping[int, float], old: Mapping[int, float], *, higher_is_better: bool
) -> Comparison | None:
    """Seed by seed; None without a shared seed.

    Args:
        new, old: values of the method and of the baseline, by seed.
    """
    shared = sorted(new.keys() & old.keys())
    if not shared:
        return None
    changes = [new[seed] - old[seed] for seed in shared]
    sign = 1 if higher_is_better else -1
    better = sum(sign * change > 0 for change in changes)
    return Comparison(statistics.fmean(changes), better, len(shared), _paired_p(changes))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrected p-values, so that the chance of any false find over all tests stays below each.

    The smallest of m is multiplied by m, the next by m - 1, and none falls below one before it.
    None is no test and counts for nothing.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    tests = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for done, (p, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - done) * p))
        corrected[place] = largest
    return corrected


def ranks(values: Sequence[float], *, higher_is_better: bool = False) -> list[float]:
    """1 for the best; equal values share the mean of their ranks."""
    from scipy.stats import rankdata

    signed = [-value for value in values] if higher_is_better else list(values)
    return [float(rank) for rank in rankdata(signed)]


def _paired_p(changes: Sequence[float]) -> float | None:
    if len(changes) < FEWEST or len(set(changes)) == 1:
        return None
    from scipy.stats import ttest_1samp

    p = float(ttest_1samp(changes, 0.0).pvalue)
    return p if math.isfinite(p) else None
