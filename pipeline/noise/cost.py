"""What choosing noise costs, against what generating costs."""

import math
from dataclasses import dataclass
from typing import Any

from data.errors import InputError
from pipeline.config import BuildConfig
from pipeline.noise.rungs import (
    choice_keeps,
    choice_points,
    choices_at_once,
    scored_sets,
    scoring_steps,
    selection_rows,
)
from pipeline.plan import BuildPlan
from pipeline.rows import count_rows

# A gradient step through a checkpointed network: forward, forward again, and a backward pass that
# costs one, since the weights want no gradients.
GRADIENT = 3


@dataclass(frozen=True)
class NoiseCost:
    """Denoiser rows, one sample in one network call each, of a whole build.

    Attributes:
        rows: spent on choosing noise; a row with its gradient counts as three.
        production_rows: spent on the images, through the whole network.
    """

    rows: int
    production_rows: int

    @property
    def ratio(self) -> float:
        """Times the cost of generating."""
        return self.rows / self.production_rows


def selection_cost(plan: BuildPlan) -> NoiseCost:
    """Exact for full batches; 0 rows where noise is random."""
    return noise_cost(plan.config, groups=plan.num_groups, pairs=plan.num_pairs)


def noise_cost(config: BuildConfig, *, groups: int, pairs: int) -> NoiseCost:
    """The cost for a number of groups and of class sets."""
    production = groups * count_rows(config.generator, config.mixing.images).full
    if config.noise.strategy == "random":
        return NoiseCost(0, production)
    choices = {"group": groups, "pair": pairs, "run": 1}[config.noise.bank]
    selecting = selection_rows(config, pairs=pairs) * choices / choices_at_once(config)
    optimising = choices * choice_keeps(config) * optimisation_rows(config, pairs=pairs)
    return NoiseCost(math.ceil(selecting) + optimising, production)


def optimisation_rows(config: BuildConfig, *, pairs: int) -> int:
    """Row equivalents of optimising one noise: its gradient steps, and a last look at the end."""
    noise = config.noise
    if noise.strategy != "optimise":
        return 0
    guided = 2 if noise.guidance_scale > 1 else 1
    conditions = scored_sets(config, pairs) * choice_points(config)
    rows = conditions * 2 * scoring_steps(config) * guided
    return rows * ((1 if noise.detach_target else GRADIENT) * noise.iterations + 1)


def refuse_cost(plan: BuildPlan) -> None:
    """Raises InputError where choosing noise costs more than `noise.max_cost` allows."""
    cost, noise = selection_cost(plan), plan.config.noise
    if cost.ratio <= noise.max_cost:
        return
    field = "candidates" if noise.strategy == "select" else "iterations"
    remedy = (
        f"choosing noise would cost {cost.ratio:.3g} times what generating costs ({cost.rows:,} "
        f"network rows against {cost.production_rows:,}), above noise.max_cost = "
        f"{noise.max_cost:g}; {_cheaper(plan, cost.ratio)}raise noise.max_cost"
    )
    raise InputError(f"noise.{field}", getattr(noise, field), remedy)


def _cheaper(plan: BuildPlan, ratio: float) -> str:
    """What would cost less, each with its price: `cheaper are noise.bank: run (0.8); or `."""
    found = []
    for text, changed in _alternatives(plan.config, plan.config.noise.max_cost / ratio):
        cost = noise_cost(changed, groups=plan.num_groups, pairs=plan.num_pairs)
        if cost.ratio < ratio:
            found.append(f"{text} ({cost.ratio:.2g})")
    return f"cheaper are {', '.join(found)}; or " if found else ""


def _alternatives(config: BuildConfig, share: float) -> list[tuple[str, BuildConfig]]:
    """Other ways to choose noise; `share` is what is allowed of the cost as it is."""
    noise, kept = config.noise, config.mixing.groups_per_pair
    fewer = max(1, int(noise.candidates * share))
    ways: list[dict[str, Any]] = [{"halving": True}]
    if noise.strategy == "optimise":
        ways += [{"strategy": "select"}, {"iterations": max(1, int(noise.iterations * share))}]
    elif noise.bank != "pair" or fewer >= kept:
        ways.append({"candidates": fewer})
    if noise.bank == "group" and noise.candidates >= kept:
        ways.append({"bank": "pair"})
    if noise.bank != "run":
        ways.append({"bank": "run"})
    return [(_yaml(way), _changed(config, way)) for way in ways]


def _yaml(way: dict[str, Any]) -> str:
    return ", ".join(f"noise.{key}: {str(value).lower()}" for key, value in way.items())


def _changed(config: BuildConfig, way: dict[str, Any]) -> BuildConfig:
    return config.model_copy(update={"noise": config.noise.model_copy(update=way)})
