"""Plan how candidate noises are scored, and count the cost of noise selection, without torch."""

import math
from dataclasses import dataclass

from semix.data.errors import InputError
from semix.pipeline.config import BuildConfig
from semix.pipeline.generators.schedulers import network_rows
from semix.pipeline.plan import BuildPlan

# Fraction of the steps in the first rung of halving, which scores at one point only. Measured on
# the digits' small model over 45 pairs, with T = 10 and three points: with 4 candidates, scoring
# this way costs 0.48 of the rows of full scoring and ranks candidates almost the same (rank
# correlation 0.95). The noise it picks scores 0.07 standard deviations worse on the full score, and
# less with more candidates. With a quarter of the steps at all points, it costs 0.55 of the rows,
# the rank correlation is 0.68, and with 8 candidates the noise it picks scores 0.15 standard
# deviations worse. `benchmarks/noise_search.py` repeats the measurement on other noises.
FIRST_STEPS = 0.7
# In forward passes: a gradient step through a checkpointed network takes two forward passes, and a
# backward pass that costs as much as one, because the weights need no gradients.
GRADIENT_STEP_COST = 3


@dataclass(frozen=True)
class Rung:
    """One round of scoring the remaining candidates of each group.

    Attributes:
        point: the only point at which they are scored, a position in the series; None: all points.
    """

    candidates: int
    steps: int
    point: int | None = None


@dataclass(frozen=True)
class NoiseCost:
    """Cost in denoiser rows; a row is one sample in one network call.

    Attributes:
        rows: for noise selection; a row with its gradient counts as three.
        generation_rows: for generating the images.
    """

    rows: int
    generation_rows: int

    @property
    def ratio(self) -> float:
        """Cost of noise selection as a multiple of the cost of generating."""
        return self.rows / self.generation_rows


def noise_cost(config: BuildConfig, *, groups: int) -> NoiseCost:
    """The cost for a number of groups: exact for full batches, 0 rows without scores."""
    generation = groups * network_rows(config.generator, config.mixing.images)
    if config.noise.strategy not in ("select", "optimise"):
        return NoiseCost(0, generation)
    selection = math.ceil(selection_rows(config) * groups / selections_at_once(config))
    return NoiseCost(selection + groups * optimisation_rows(config), generation)


def check_noise_cost(plan: BuildPlan) -> None:
    """Raises InputError if noise selection costs more than `noise.max_cost` allows."""
    cost, noise = noise_cost(plan.config, groups=plan.num_groups), plan.config.noise
    if cost.ratio <= noise.max_cost:
        return
    field = "candidates" if noise.strategy == "select" else "iterations"
    remedy = (
        f"selecting noise would cost {cost.ratio:.3g} times what generating costs ({cost.rows:,} "
        f"network rows against {cost.generation_rows:,}), above noise.max_cost = "
        f"{noise.max_cost:g}; take fewer {field}, noise.halving: true, or raise noise.max_cost"
    )
    raise InputError(f"noise.{field}", getattr(noise, field), remedy)


def rungs(config: BuildConfig) -> list[Rung]:
    """The rounds of scoring: one full round over all candidates.

    With `noise.halving`, if it is cheaper: a short round over all candidates (fewer steps, one
    point), then a full round over the best quarter.
    """
    noise, steps = config.noise, scoring_steps(config)
    if noise.strategy == "optimise" and noise.candidates == 1:
        return []  # nothing to select: the only candidate is optimised
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

    Without padding a selection takes 2 K A T rows: K candidates, A points, T steps of sampling and
    T of inversion; twice that with guidance.
    """
    total = 0
    for rung in rungs(config):
        points = _points(config) if rung.point is None else 1
        rows = selections_at_once(config) * rung.candidates * points
        size = rows_per_forward(rows, max_rows=generation_batch(config))
        total += math.ceil(rows / size) * size * 2 * rung.steps
    return total * _rows_per_prediction(config)


def optimisation_rows(config: BuildConfig) -> int:
    """Cost of optimising one noise, in denoiser rows: its gradient steps and a final score."""
    noise = config.noise
    if noise.strategy != "optimise":
        return 0
    rows = _points(config) * 2 * scoring_steps(config) * _rows_per_prediction(config)
    return rows * ((1 if noise.detach_target else GRADIENT_STEP_COST) * noise.iterations + 1)


def selections_at_once(config: BuildConfig) -> int:
    """Number of groups whose candidates share forward batches; 1 for optimised noise."""
    return config.shards.groups_per_batch if config.noise.strategy == "select" else 1


def generation_batch(config: BuildConfig) -> int:
    """Images in one forward batch, which is known to fit the device."""
    return config.shards.groups_per_batch * config.mixing.images


def rows_per_forward(rows: int, *, max_rows: int) -> int:
    """Common size of all forward batches over `rows` rows.

    At most `max_rows`, with as little padding as possible.
    """
    return math.ceil(rows / math.ceil(rows / max_rows))


def _points(config: BuildConfig) -> int:
    """Number of points at which a noise is scored: the alphas, or k classes and their mean."""
    return len(config.noise.alphas) if config.mixing.classes == 2 else config.mixing.classes + 1


def _middle_point(config: BuildConfig) -> int:
    """Index of the point nearest to the middle of the series.

    With more than two classes: the mean of all of them, which is the last point.
    """
    if config.mixing.classes > 2:
        return config.mixing.classes
    alphas = config.noise.alphas
    return min(range(len(alphas)), key=lambda point: abs(alphas[point] - 0.5))


def _rows_per_prediction(config: BuildConfig) -> int:
    return 2 if config.noise.guidance_scale > 1 and config.generator.two_rows else 1
