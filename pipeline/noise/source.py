"""What noise a batch of groups gets, and what their records say about it."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch
from semix.data.errors import InputError
from semix.data.fingerprint import hashed_seed
from semix.pipeline.conditioning import Conditioning, concatenate, mix
from semix.pipeline.config import FLOW_FAMILIES, BuildConfig
from semix.pipeline.generators.schedulers import inversion_pair
from semix.pipeline.noise.cost import production_batch, rungs, scoring_steps
from semix.pipeline.noise.search import (
    NoiseSelection,
    Scorer,
    initial_noise,
    optimise_noise,
    select_noise,
)
from semix.pipeline.plan import BuildPlan, MixGroup
from torch import Tensor

if TYPE_CHECKING:
    from semix.pipeline.generators.latent_diffusion import LatentDiffusion

TRIED = 4  # noises that a flow model's stability must tell apart
SIGNAL = 5.0  # their spread, in times that of scoring one of them again and again
UNSTABLE = "no noise has a stability: the network gave NaN; try another dtype"


class NoiseNote(TypedDict):
    """What the record of a series says of its noise; all but the first two where it was chosen.

    Attributes:
        scores: of the candidates; None for those that a first look left out.
        per_alpha: scores of the chosen one at each point.
        seed: None where no seed gives the noise again.
        start_stability, iterations: where it was optimised.
    """

    strategy: str
    stability: float | None
    candidates: NotRequired[int]
    scores: NotRequired[list[float | None]]
    steps: NotRequired[int]
    guidance_scale: NotRequired[float]
    per_alpha: NotRequired[Sequence[float] | None]
    seed: NotRequired[int | None]
    digest: NotRequired[str]
    start_stability: NotRequired[float]
    iterations: NotRequired[int]


# Noise of some groups, float32 [G, C, h, w] on the CPU; what each record says of it; and by row
# why it cannot be used.
Drawn = tuple[Tensor, list[NoiseNote], dict[int, str]]
NoiseSource = Callable[[Sequence[MixGroup]], Drawn]


def noise_source(
    plan: BuildPlan,
    *,
    generator: "LatentDiffusion",
    embeddings: Conditioning,
    heartbeat: Callable[[], None] = lambda: None,
) -> NoiseSource:
    """What the config asks for; but for flow models nothing is scored before the first groups come.

    Args:
        embeddings: of all classes, one row each.
        beat: called while noises are chosen.
    Raises:
        InputError: noise shall be chosen, and the model's scheduler cannot be inverted, or its
            stability does not tell noises apart.
    """
    config = plan.config
    shape = tuple(generator.latent_shape)
    if config.noise.strategy == "random":
        return random_noise(shape)
    scorer = Scorer(
        generator.predict,
        inversion_pair(generator.denoiser.scheduler),
        guidance_scale=config.noise.guidance_scale,
        most_rows=production_batch(config),
        heartbeat=heartbeat,
    )
    if config.generator.family in FLOW_FAMILIES:
        _check_signal(scorer, config, embeddings, shape, generator.dtype)
    chooser = NoiseSelector(plan, embeddings, scorer, shape)
    return chooser.select if config.noise.strategy == "select" else chooser.optimise


def _check_signal(
    scorer: Scorer,
    config: BuildConfig,
    embeddings: Conditioning,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Euler follows a straight flow back to where it came from, so scores may be rounding alone.

    Args:
        dtype: of the network, whose last bit one noise is moved by to score it again.
    Raises:
        InputError: other noises move the score hardly more than scoring one noise again does.
    """
    noises, others = initial_noise(range(2 * TRIED), shape).split(TRIED)
    # Not the very same one: equal bits in give equal bits out.
    sets = torch.stack([noises, noises[:1] + torch.finfo(dtype).eps * others])
    scores = scorer(sets, embeddings[[0, 0]], steps=scoring_steps(config))  # [2, TRIED, 1]
    spread, again = scores[..., 0].std(dim=1).tolist()
    again = max(again, torch.finfo(scores.dtype).eps)
    if not spread > SIGNAL * again:
        remedy = f"the stability of this model's noises differs by {spread:.1g}, that of one noise "
        remedy += f"scored again by {again:.1g}: nothing to choose by; set it to random"
        raise InputError("noise.strategy", config.noise.strategy, remedy)


def random_noise(shape: Sequence[int]) -> NoiseSource:
    """The noise of each group's own seed, unscored."""

    def draw(groups: Sequence[MixGroup]) -> Drawn:
        record: NoiseNote = {"strategy": "random", "stability": None}
        return initial_noise([group.seed for group in groups], shape), [record] * len(groups), {}

    return draw


@dataclass(frozen=True)
class NoiseSelector:
    """Chooses noises by stability, as a pure function of the plan and the group.

    Attributes:
        embeddings: of all classes, one row each.
        shape: of one noise.
    """

    plan: BuildPlan
    embeddings: Conditioning
    scorer: Scorer
    shape: tuple[int, ...]

    def select(self, groups: Sequence[MixGroup]) -> Drawn:
        """The most stable candidate of each group of a batch; a short one repeats its last group,
        since the layout of a forward batch moves the last bits of a score."""
        missing = self.plan.config.shards.groups_per_batch - len(groups)
        choices = self._choices([*groups, *[groups[-1]] * missing])[: len(groups)]
        seeds = [choice.seeds[choice.best] for choice in choices]
        noise = initial_noise(seeds, self.shape)
        records: list[NoiseNote] = [
            {
                **self._shared(choice.scores),
                "stability": choice.scores[choice.best],
                "per_alpha": choice.per_point[choice.best],
                "seed": seed,
                "digest": noise_digest(one),
            }
            for choice, seed, one in zip(choices, seeds, noise, strict=True)
        ]
        return noise, records, _faults(choice.scores[choice.best] for choice in choices)

    def optimise(self, groups: Sequence[MixGroup]) -> Drawn:
        """Gradient descent from the best candidate of each group, or from its only one; one group
        after the other, since gradients leave no room on the device for more."""
        noises, records = zip(*[self._optimised(group) for group in groups], strict=True)
        return torch.stack(noises), list(records), _faults(r["stability"] for r in records)

    def _optimised(self, group: MixGroup) -> tuple[Tensor, NoiseNote]:
        config, seeds = self.plan.config, self._seeds(group)
        choice = None if len(seeds) == 1 else self._choices([group])[0]
        found = optimise_noise(
            initial_noise([seeds[choice.best if choice else 0]], self.shape),
            scoring_conditions([group.classes], config, self.embeddings),
            scorer=self.scorer,
            steps=scoring_steps(config),
            settings=config.noise,
        )
        start = float(found.history[0, 0])
        # No seed gives this noise again, and whoever keeps it keeps float16: images start from what
        # such a file holds. The last bits of gradients, which differ by device, mostly round away.
        noise = found.noise[0].half().float()
        return noise, {
            **self._shared(choice.scores if choice else (start,)),
            "stability": float(found.scores[0]),
            "per_alpha": found.per_point[0].tolist(),
            "seed": None,
            "digest": noise_digest(noise),
            "start_stability": start,
            "iterations": len(found.history) - 1,
        }

    def _choices(self, groups: Sequence[MixGroup]) -> list[NoiseSelection]:
        """Of each group among its candidates; they share forward batches."""
        config = self.plan.config
        return select_noise(
            [self._seeds(group) for group in groups],
            scoring_conditions([group.classes for group in groups], config, self.embeddings),
            scorer=self.scorer,
            shape=self.shape,
            rungs=rungs(config),
            reduce=config.noise.reduce,
        )

    def _seeds(self, group: MixGroup) -> tuple[int, ...]:
        """Of all candidates; the first is the group's own, so that one is its random noise."""
        seed, others = self.plan.config.mixing.seed, range(1, self.plan.config.noise.candidates)
        return group.seed, *(hashed_seed(seed, "group", group.index, c) for c in others)

    def _shared(self, scores: tuple[float | None, ...]) -> NoiseNote:
        """What is told of a choice, however it was made; its stability is still to come."""
        config = self.plan.config
        return {
            "strategy": config.noise.strategy,
            "stability": None,
            "candidates": config.noise.candidates,
            "scores": list(scores),
            "steps": scoring_steps(config),
            "guidance_scale": config.noise.guidance_scale,
        }


def scoring_conditions(
    sets: Sequence[tuple[int, ...]], config: BuildConfig, embeddings: Conditioning
) -> Conditioning:
    """What noises are scored under: P rows for each set of classes."""
    points = scoring_points(config).to(embeddings.tokens.device)
    mode = config.mixing.interpolation
    return concatenate(mix(embeddings, classes, points, mode) for classes in sets)


def scoring_points(config: BuildConfig) -> Tensor:
    """Where a series is scored: weights of its k classes, [P, k].

    For pairs at the alphas of the config; for more classes pure, then at their centroid.
    """
    classes = config.mixing.classes
    if classes == 2:
        return torch.tensor([[alpha, 1 - alpha] for alpha in config.noise.alphas])
    return torch.cat([torch.eye(classes), torch.full((1, classes), 1 / classes)])


def noise_digest(noise: Tensor) -> str:
    """sha256 of the float32 values."""
    return hashlib.sha256(noise.cpu().contiguous().numpy().tobytes()).hexdigest()


def _faults(scores: Iterable[float | None]) -> dict[int, str]:
    """By row, that no noise of a group has a score."""
    rows = enumerate(scores)
    return {row: UNSTABLE for row, score in rows if score is None or not math.isfinite(score)}
