"""Plan how candidate noises are scored, and count the cost of noise selection, without torch."""

import math
from dataclasses import dataclass

from semix.data.errors import InputError
from semix.pipeline.config import BuildConfig
from semix.pipeline.generators.schedulers import network_rows
from semix.pipeline.plan import BuildPlan

# Fraction of the steps in the first rung of halving, which scores at one point only. Measured on
# the digits' small model over 45 pairs, T = 10 and three points: 0.48 of the rows, rank correlation
# 0.95 with the full score, 0.07 standard deviations of it lost with 4 candidates and less with
# more; `benchmarks/noise_search.py` repeats it on other noises. A quarter of the steps at all
# points takes 0.55 of the rows, correlates 0.68 and loses 0.15 with 8 candidates.
FIRST_STEPS = 0.7
# Forward passes that a gradient step through a checkpointed network costs: two forwards, and a
# backward that costs one, since the weights need no gradients.
GRADIENT = 3


@dataclass(frozen=True)
class Rung:
    """One round of scoring the remaining candidates of each group.

    Attributes:
        point: the one point of the series at which they are scored; None scores at all points.
    """

    candidates: int
    steps: int
    point: int | None = None


@dataclass(frozen=True)
class NoiseCost:
    """Cost in denoiser rows; a row is one sample in one network call.

    Attributes:
        rows: for noise selection; a row with its gradient counts as three.
        production_rows: for the images.
    """

    rows: int
    production_rows: int

    @property
    def ratio(self) -> float:
        """Cost of noise selection as a multiple of the cost of generating."""
        return self.rows / self.production_rows


def noise_cost(config: BuildConfig, *, groups: int) -> NoiseCost:
    """The cost for a number of groups: exact for full batches, 0 rows for random noise."""
    production = groups * network_rows(config.generator, config.mixing.images)
    if config.noise.strategy == "random":
        return NoiseCost(0, production)
    selection = math.ceil(selection_rows(config) * groups / selections_at_once(config))
    return NoiseCost(selection + groups * optimisation_rows(config), production)


def check_noise_cost(plan: BuildPlan) -> None:
    """Raises InputError if noise selection costs more than `noise.max_cost` allows."""
    cost, noise = noise_cost(plan.config, groups=plan.num_groups), plan.config.noise
    if cost.ratio <= noise.max_cost:
        return
    field = "candidates" if noise.strategy == "select" else "iterations"
    remedy = (
        f"selecting noise would cost {cost.ratio:.3g} times what generating costs ({cost.rows:,} "
        f"network rows against {cost.production_rows:,}), above noise.max_cost = "
        f"{noise.max_cost:g}; take fewer {field}, noise.halving: true, or raise noise.max_cost"
    )
    raise InputError(f"noise.{field}", getattr(noise, field), remedy)


def rungs(config: BuildConfig) -> list[Rung]:
    """The rounds of scoring: one with all candidates in full; or with halving, where that costs
    less, one with fewer steps at one point, then one with a quarter of the candidates in full."""
    noise, steps = config.noise, scoring_steps(config)
    if noise.strategy == "optimise" and noise.candidates == 1:
        return []  # the optimisation scores its start
    full = Rung(noise.candidates, steps)
    halving = Rung(noise.candidates, math.ceil(FIRST_STEPS * steps), _middle_point(config))
    final = Rung(math.ceil(noise.candidates / 4), steps)
    full_cost = full.candidates * steps * _points(config)
    halving_cost = halving.candidates * halving.steps + final.candidates * steps * _points(config)
    return [halving, final] if noise.halving and halving_cost < full_cost else [full]


def scoring_steps(config: BuildConfig) -> int:
    """Steps of sampling and of inversion for a score: at most `generator.steps`."""
    return min(config.noise.steps, config.generator.steps)


def selection_rows(config: BuildConfig) -> int:
    """Denoiser rows of `selections_at_once` selections, with padding.

    Without padding K A 2T per selection, for K candidates under A conditions; twice that if the
    score is guided.
    """
    total = 0
    for rung in rungs(config):
        points = _points(config) if rung.point is None else 1
        rows = selections_at_once(config) * rung.candidates * points
        size = rows_per_forward(rows, max_rows=production_batch(config))
        total += math.ceil(rows / size) * size * 2 * rung.steps
    return total * _rows_per_prediction(config)


def optimisation_rows(config: BuildConfig) -> int:
    """Row equivalents of optimising one noise: its gradient steps and a last scoring."""
    noise = config.noise
    if noise.strategy != "optimise":
        return 0
    rows = _points(config) * 2 * scoring_steps(config) * _rows_per_prediction(config)
    return rows * ((1 if noise.detach_target else GRADIENT) * noise.iterations + 1)


def selections_at_once(config: BuildConfig) -> int:
    """Number of groups whose candidates share forward batches; 1 for optimised noise."""
    return config.shards.groups_per_batch if config.noise.strategy == "select" else 1


def production_batch(config: BuildConfig) -> int:
    """Images in one forward batch, which is known to fit the device."""
    return config.shards.groups_per_batch * config.mixing.images


def rows_per_forward(rows: int, *, max_rows: int) -> int:
    """The common size of all forward batches over `rows`: at most `most`, with least padding."""
    return math.ceil(rows / math.ceil(rows / max_rows))


def _points(config: BuildConfig) -> int:
    """Number of conditions per noise: the alphas, or k pure classes and their mean."""
    return len(config.noise.alphas) if config.mixing.classes == 2 else config.mixing.classes + 1


def _middle_point(config: BuildConfig) -> int:
    """Index of the point nearest to the middle; for a simplex the centroid, which is last."""
    if config.mixing.classes > 2:
        return config.mixing.classes
    alphas = config.noise.alphas
    return min(range(len(alphas)), key=lambda point: abs(alphas[point] - 0.5))


def _rows_per_prediction(config: BuildConfig) -> int:
    return 2 if config.noise.guidance_scale > 1 and config.generator.two_rows else 1
