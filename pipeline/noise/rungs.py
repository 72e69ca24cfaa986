"""How many candidates are scored at how many steps, counted without torch."""

import math
from dataclasses import dataclass

from pipeline.config import BuildConfig

SAMPLE_SETS = 8  # class sets under which a bank for the whole run is scored
# Share of the steps in the first look of halving, which is at one point alone. Measured on the
# digits' small model over 45 pairs, T = 10 and three points: 0.48 of the rows, rank correlation
# 0.95 with the full score, 0.07 standard deviations of it lost with 4 candidates and less with
# more; `benchmarks/noise_search.py` repeats it on other noises. A quarter of the steps at all
# points takes 0.55 of the rows, correlates 0.68 and loses 0.15 with 8 candidates.
FIRST_STEPS = 0.7


@dataclass(frozen=True)
class Rung:
    """One round of scoring the candidates that are left in each choice.

    Attributes:
        point: the only one of the series' points they are scored at; None scores at all.
    """

    candidates: int
    steps: int
    point: int | None = None


def scoring_steps(config: BuildConfig) -> int:
    """T of sampling and of inversion: never more than what images are made with."""
    return min(config.noise.steps, sampling_steps(config))


def sampling_steps(config: BuildConfig) -> int:
    return config.generator.approximate.steps or config.generator.steps


def choice_keeps(config: BuildConfig) -> int:
    """Noises that one choice gives: one a group, or as many as its bank hands out."""
    noise = config.noise
    if noise.bank == "group":
        return 1
    if noise.bank == "pair":
        return config.mixing.groups_per_pair
    return noise.keep or math.ceil(noise.candidates / 8)


def choice_points(config: BuildConfig) -> int:
    """Conditions a set of classes is scored under: the alphas, or k pure classes and their mean."""
    return len(config.noise.alphas) if config.mixing.classes == 2 else config.mixing.classes + 1


def scored_sets(config: BuildConfig, pairs: int) -> int:
    """Sets of classes that one candidate is scored under."""
    return min(SAMPLE_SETS, pairs) if config.noise.bank == "run" else 1


def middle_point(config: BuildConfig) -> int:
    """The point nearest to the middle of the series: of a simplex the centroid, which is last."""
    if config.mixing.classes > 2:
        return config.mixing.classes
    alphas = config.noise.alphas
    return min(range(len(alphas)), key=lambda point: abs(alphas[point] - 0.5))


def rungs(config: BuildConfig) -> list[Rung]:
    """All candidates in full; or by successive halving with fewer steps in the middle of the
    series alone, then the best quarter in full (never fewer than are kept)."""
    noise, steps = config.noise, scoring_steps(config)
    if noise.strategy == "optimise" and noise.candidates == 1:
        return []  # the optimisation scores its start itself
    whole = Rung(noise.candidates, steps)
    finalists = max(math.ceil(noise.candidates / 4), choice_keeps(config))
    first = Rung(noise.candidates, math.ceil(FIRST_STEPS * steps), middle_point(config))
    saved = whole.candidates * whole.steps * choice_points(config)
    spent = first.candidates * first.steps + finalists * steps * choice_points(config)
    return [first, Rung(finalists, steps)] if noise.halving and spent < saved else [whole]


def production_batch(config: BuildConfig) -> int:
    """Images in one forward batch, which is what the device is known to hold."""
    return config.shards.groups_per_batch * config.mixing.images


def rows_per_forward(rows: int, *, most: int) -> int:
    """The one size of all forward batches over `rows`: at most `most`, and so divided that next
    to nothing is padding."""
    return math.ceil(rows / math.ceil(rows / most))


def choices_at_once(config: BuildConfig) -> int:
    """Choices whose candidates share forward batches; what is stored is chosen alone, so that
    it never depends on which other choices are stored already."""
    return config.shards.groups_per_batch if not stored(config) else 1


def stored(config: BuildConfig) -> bool:
    """Whether choices are kept in the root: those that series share, and optimised noises."""
    return config.noise.bank != "group" or config.noise.strategy == "optimise"


def selection_rows(config: BuildConfig, *, pairs: int) -> int:
    """Denoiser rows of `choices_at_once` choices, padding included.

    Without padding it is K A 2T a choice for K candidates under A conditions, twice that where
    the score is guided.
    """
    guided = 2 if config.noise.guidance_scale > 1 else 1
    total = 0
    for rung in rungs(config):
        points = choice_points(config) if rung.point is None else 1
        rows = choices_at_once(config) * rung.candidates * scored_sets(config, pairs) * points
        size = rows_per_forward(rows, most=production_batch(config))
        total += math.ceil(rows / size) * size * 2 * rung.steps * guided
    return total
