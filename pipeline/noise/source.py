"""Give the groups of a batch their noise, and the records that describe it."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch
from torch import Tensor

from semix.data.errors import InputError
from semix.data.fingerprint import hashed_seed
from semix.pipeline.conditioning import Conditioning, concatenate, mix
from semix.pipeline.config import FLOW_FAMILIES, BuildConfig
from semix.pipeline.generators.schedulers import inversion_pair
from semix.pipeline.noise.cost import generation_batch, rungs, scoring_steps
from semix.pipeline.noise.search import (
    NoiseSelection,
    Scorer,
    initial_noise,
    optimise_noise,
    select_noise,
)
from semix.pipeline.plan import BuildPlan, MixGroup

if TYPE_CHECKING:
    from semix.pipeline.generators.latent_diffusion import LatentDiffusion

SIGNAL_NOISES = 4  # noises whose stability a flow model must be able to distinguish
MIN_SIGNAL = 5.0  # minimum spread of their scores, as a multiple of that of one noise scored again
UNSTABLE = "no noise has a stability: the network gave NaN; try another dtype"


class NoiseNote(TypedDict):
    """The noise in the record of a series; random noise has the first two fields only.

    Attributes:
        scores: of the candidates; None for those that the first rung dropped.
        per_alpha: scores of the selected noise at each point.
        seed: None for optimised noise, which no seed reproduces.
        start_stability, iterations: of optimised noise.
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


# Noise of some groups, float32 [G, C, h, w] on the CPU; its records; and faults by row.
GroupNoise = tuple[Tensor, list[NoiseNote], dict[int, str]]
NoiseSource = Callable[[Sequence[MixGroup]], GroupNoise]


def noise_source(
    plan: BuildPlan,
    *,
    generator: "LatentDiffusion",
    embeddings: Conditioning,
    heartbeat: Callable[[], None] = lambda: None,
) -> NoiseSource:
    """The noise source of a plan; only flow models score noises before the first groups.

    Args:
        embeddings: of all classes, one row per class.
        heartbeat: called while noise is selected.
    Raises:
        InputError: noise is to be selected, but the model's scheduler cannot be inverted, or its
            stability does not distinguish noises.
    """
    config = plan.config
    shape = tuple(generator.latent_shape)
    if config.noise.strategy == "random":
        return random_noise(shape)
    if config.noise.strategy == "golden":
        return golden_noise(plan, embeddings, shape)
    scorer = Scorer(
        generator.predict,
        inversion_pair(generator.denoiser.scheduler),
        guidance_scale=config.noise.guidance_scale,
        max_rows=generation_batch(config),
        heartbeat=heartbeat,
    )
    if config.generator.family in FLOW_FAMILIES:
        _check_signal(scorer, config, embeddings, shape, generator.dtype)
    selector = NoiseSelector(plan, embeddings, scorer, shape)
    return selector.select if config.noise.strategy == "select" else selector.optimise


def _check_signal(
    scorer: Scorer,
    config: BuildConfig,
    embeddings: Conditioning,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Refuse scores that differ by rounding alone: Euler steps invert a straight flow exactly.

    Args:
        dtype: of the network; its last bit is the perturbation when one noise is scored again.
    Raises:
        InputError: scores of several noises hardly differ more than those of one noise.
    """
    noises, perturbations = initial_noise(range(2 * SIGNAL_NOISES), shape).split(SIGNAL_NOISES)
    # Perturbed, because equal bits would give equal scores.
    samples = torch.stack([noises, noises[:1] + torch.finfo(dtype).eps * perturbations])
    scores = scorer(samples, embeddings[[0, 0]], steps=scoring_steps(config))  # [2, 4, 1]
    spread, repeat_spread = scores[..., 0].std(dim=1).tolist()
    repeat_spread = max(repeat_spread, torch.finfo(scores.dtype).eps)
    if not spread > MIN_SIGNAL * repeat_spread:
        remedy = f"the stability of this model's noises differs by {spread:.1g}, that of one noise "
        remedy += f"scored again by {repeat_spread:.1g}: nothing to select by; set it to random"
        raise InputError("noise.strategy", config.noise.strategy, remedy)


def random_noise(shape: Sequence[int]) -> NoiseSource:
    """A source that draws the noise of each group from its seed, without scores."""

    def draw(groups: Sequence[MixGroup]) -> GroupNoise:
        record: NoiseNote = {"strategy": "random", "stability": None}
        return initial_noise([group.seed for group in groups], shape), [record] * len(groups), {}

    return draw


def golden_noise(plan: BuildPlan, embeddings: Conditioning, shape: tuple[int, ...]) -> NoiseSource:
    """A source that changes the noise of each group by a network, for the middle of its series.

    Raises:
        InputError: the network cannot be loaded, or was made for another model.
    """
    from semix.pipeline.noise.golden import load_golden  # timm takes seconds

    config = plan.config
    assert config.noise.network is not None, "of strategy golden"
    tokens = embeddings.tokens
    network = load_golden(
        config.noise.network, latent_shape=shape, condition_size=tokens[0].numel()
    )
    middle = torch.full((1, config.mixing.classes), 1 / config.mixing.classes).to(tokens.device)

    def draw(groups: Sequence[MixGroup]) -> GroupNoise:
        noises = []
        for group in groups:  # one by one: the batch changes the last bits
            condition = mix(embeddings, group.classes, middle, config.mixing.interpolation)
            noise = initial_noise([group.seed], shape)
            noises.append(network(noise, condition.tokens.float().cpu())[0])
        records: list[NoiseNote] = [
            {"strategy": "golden", "stability": None, "digest": noise_digest(noise)}
            for noise in noises
        ]
        return torch.stack(noises), records, {}

    return draw


@dataclass(frozen=True)
class NoiseSelector:
    """Selects noise by stability, as a pure function of the plan and the group.

    Attributes:
        embeddings: of all classes, one row per class.
        shape: shape of one noise.
    """

    plan: BuildPlan
    embeddings: Conditioning
    scorer: Scorer
    shape: tuple[int, ...]

    def select(self, groups: Sequence[MixGroup]) -> GroupNoise:
        """The most stable candidate of each group; a short batch is padded with its last group,
        since batch layout changes the last bits of a score."""
        missing = self.plan.config.shards.groups_per_batch - len(groups)
        selections = self._selections([*groups, *[groups[-1]] * missing])[: len(groups)]
        seeds = [selection.seeds[selection.best] for selection in selections]
        noise = initial_noise(seeds, self.shape)
        records: list[NoiseNote] = [
            {
                **self._shared(selection.scores),
                "stability": selection.scores[selection.best],
                "per_alpha": selection.per_point[selection.best],
                "seed": seed,
                "digest": noise_digest(group_noise),
            }
            for selection, seed, group_noise in zip(selections, seeds, noise, strict=True)
        ]
        return noise, records, _faults(s.scores[s.best] for s in selections)

    def optimise(self, groups: Sequence[MixGroup]) -> GroupNoise:
        """Gradient descent from the best candidate of each group, one by one to limit memory."""
        noises, records = zip(*[self._optimised(group) for group in groups], strict=True)
        return torch.stack(noises), list(records), _faults(r["stability"] for r in records)

    def _optimised(self, group: MixGroup) -> tuple[Tensor, NoiseNote]:
        config, seeds = self.plan.config, self._seeds(group)
        selection = None if len(seeds) == 1 else self._selections([group])[0]
        optimised = optimise_noise(
            initial_noise([seeds[selection.best if selection else 0]], self.shape),
            scoring_conditions([group.classes], config, self.embeddings),
            scorer=self.scorer,
            steps=scoring_steps(config),
            settings=config.noise,
        )
        start = float(optimised.history[0, 0])
        # No seed reproduces this noise: it may be stored as float16, so it is rounded to it now.
        # This also removes most differences of gradients between devices, in their last bits.
        noise = optimised.noise[0].half().float()
        return noise, {
            **self._shared(selection.scores if selection else (start,)),
            "stability": float(optimised.scores[0]),
            "per_alpha": optimised.per_point[0].tolist(),
            "seed": None,
            "digest": noise_digest(noise),
            "start_stability": start,
            "iterations": len(optimised.history) - 1,
        }

    def _selections(self, groups: Sequence[MixGroup]) -> list[NoiseSelection]:
        """Select among the candidates of each group; all groups share forward batches."""
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
        """Seeds of all candidates; the first is the group's own seed, that of strategy "random"."""
        seed, others = self.plan.config.mixing.seed, range(1, self.plan.config.noise.candidates)
        return group.seed, *(hashed_seed(seed, "group", group.index, c) for c in others)

    def _shared(self, scores: tuple[float | None, ...]) -> NoiseNote:
        """The fields that selected and optimised noise share; `stability` is set later."""
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
    """The conditions under which noises are scored: P rows for each set of classes."""
    points = scoring_points(config).to(embeddings.tokens.device)
    mode = config.mixing.interpolation
    return concatenate(mix(embeddings, classes, points, mode) for classes in sets)


def scoring_points(config: BuildConfig) -> Tensor:
    """The points at which a series is scored: weights of its k classes, [P, k].

    For pairs the alphas of the config; for more classes the pure classes, then their centroid.
    """
    classes = config.mixing.classes
    if classes == 2:
        return torch.tensor([[alpha, 1 - alpha] for alpha in config.noise.alphas])
    return torch.cat([torch.eye(classes), torch.full((1, classes), 1 / classes)])


def noise_digest(noise: Tensor) -> str:
    """SHA-256 of the float32 values."""
    return hashlib.sha256(noise.cpu().contiguous().numpy().tobytes()).hexdigest()


def _faults(scores: Iterable[float | None]) -> dict[int, str]:
    """Rows of groups in which no noise has a score, with the reason."""
    rows = enumerate(scores)
    return {row: UNSTABLE for row, score in rows if score is None or not math.isfinite(score)}
