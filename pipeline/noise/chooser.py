"""The choices that a plan asks for, each a function of the plan and a number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.conditioning import Conditioning, concatenate
from pipeline.noise.bank import Part, noise_digest
from pipeline.noise.initial import initial_noise
from pipeline.noise.optimisation import Optimised, optimise_noise
from pipeline.noise.rungs import choice_keeps, choice_points, rungs, scored_sets, scoring_steps
from pipeline.noise.scoring import Scorer, scoring_conditions
from pipeline.noise.selection import Choice, select_noise
from pipeline.plan import BuildPlan, group_seed
from pipeline.plan.seeds import hashed_seed

Number = int | None  # of a group, or of a pair, as the bank says; None for the whole run


@dataclass(frozen=True)
class Chooser:
    """Chooses noises by stability.

    Attributes:
        embeddings: of all classes, one row each.
        shape: of one noise.
    """

    plan: BuildPlan
    embeddings: Conditioning
    scorer: Scorer
    shape: tuple[int, ...]

    def select(self, numbers: Sequence[Number]) -> list[Part]:
        """Several choices among candidates; their candidates share forward batches.

        Raises:
            FloatingPointError: too few candidates of one have a score, by its name.
        """
        return [self._selected(choice) for choice in self._choices(numbers)]

    def optimise(self, number: Number) -> Part:
        """The best candidates of one choice, or its only one, after gradient descent.

        Raises:
            FloatingPointError: a start has no score.
        """
        seeds = self.seeds(number)
        choice = None if len(seeds) == 1 else self._choices([number])[0]
        best = (0,) if choice is None else choice.best
        found = optimise_noise(
            initial_noise([seeds[candidate] for candidate in best], self.shape),
            self.conditions(number),
            scorer=self.scorer,
            steps=scoring_steps(self.plan.config),
            points=choice_points(self.plan.config),
            settings=self.plan.config.noise,
            name=self.name(number),
        )
        return self._optimised(found, seeds, choice)

    def seeds(self, number: Number) -> tuple[int, ...]:
        """Of all candidates; the first is that of the series itself, or of the first that shares
        the choice, so that one candidate is random noise."""
        config, first = self.plan.config, number or 0
        seed, bank = config.mixing.seed, config.noise.bank
        others = range(1, config.noise.candidates)
        return group_seed(seed, first), *(hashed_seed(seed, bank, first, c) for c in others)

    def conditions(self, number: Number) -> Conditioning:
        """What the candidates of a choice are scored under."""
        plan = self.plan
        if number is None:
            count = scored_sets(plan.config, plan.num_pairs)
            sets = [plan.sets[rank * plan.num_pairs // count] for rank in range(count)]
        else:
            sets = [plan.sets[number % plan.num_pairs]]
        return scoring_conditions(sets, plan.config, self.embeddings)

    def name(self, number: Number) -> str:
        return "noise of the run" if number is None else f"{self.plan.config.noise.bank} {number}"

    def _choices(self, numbers: Sequence[Number]) -> list[Choice]:
        config = self.plan.config
        return select_noise(
            [self.seeds(number) for number in numbers],
            concatenate(self.conditions(number) for number in numbers),
            scorer=self.scorer,
            shape=self.shape,
            rungs=rungs(config),
            names=[self.name(number) for number in numbers],
            points=choice_points(config),
            reduce=config.noise.reduce,
            keep=choice_keeps(config),
        )

    def _selected(self, choice: Choice) -> Part:
        seeds = [choice.seeds[candidate] for candidate in choice.best]
        entries = [
            {
                "stability": choice.scores[candidate],
                "per_alpha": choice.per_point[candidate],
                "seed": seed,
                "digest": noise_digest(noise),
            }
            for candidate, seed, noise in zip(
                choice.best, seeds, initial_noise(seeds, self.shape), strict=True
            )
        ]
        return Part(
            {
                "common": self._common(choice.scores),
                "entries": entries,
                "seeds": choice.seeds,
                "per_alpha": choice.per_point,
            }
        )

    def _optimised(self, found: Optimised, seeds: Sequence[int], choice: Choice | None) -> Part:
        start = found.history[0].tolist()
        order = sorted(range(len(found.scores)), key=lambda row: -float(found.scores[row]))
        tensors = found.noise[order].half()
        entries = [
            {
                "stability": float(found.scores[row]),
                "per_alpha": found.per_point[row].tolist(),
                "seed": None,
                "digest": noise_digest(tensor.float()),
                "start_stability": start[row],
                "iterations": len(found.history) - 1,
            }
            for row, tensor in zip(order, tensors, strict=True)
        ]
        return Part(
            {
                "common": self._common(tuple(start) if choice is None else choice.scores),
                "entries": entries,
                "seeds": seeds,
                "starts": [0] if choice is None else [choice.best[row] for row in order],
                "history": _plain(found.history[:, order]),
            },
            tensors,
        )

    def _common(self, scores: tuple[float | None, ...]) -> dict[str, Any]:
        config = self.plan.config
        return {
            "strategy": config.noise.strategy,
            "bank": config.noise.bank,
            "candidates": config.noise.candidates,
            "scores": list(scores),
            "steps": scoring_steps(config),
            "guidance_scale": config.noise.guidance_scale,
        }


def _plain(values: Tensor) -> list[list[float | None]]:
    """[I, N] with None for NaN, which JSON does not know."""
    return [[v if math.isfinite(v) else None for v in row] for row in values.tolist()]
