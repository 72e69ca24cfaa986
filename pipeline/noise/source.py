"""Where a batch of groups gets its noise from, and what its records say about it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data.leases import Renewing
from data.store import Store
from pipeline.conditioning import Conditioning
from pipeline.noise.bank import Bank, Part
from pipeline.noise.chooser import Chooser, Number
from pipeline.noise.initial import initial_noise
from pipeline.noise.rungs import production_batch, stored
from pipeline.noise.scoring import Scorer
from pipeline.plan import BuildPlan, MixGroup

if TYPE_CHECKING:
    from pipeline.generators.latent_diffusion import LatentDiffusion

# Groups to their noise, float32 [G, C, h, w] on the CPU, and the `noise` part of each record.
NoiseSource = Callable[[Sequence[MixGroup]], tuple[Tensor, list[dict[str, Any]]]]


def noise_source(
    plan: BuildPlan,
    *,
    generator: "LatentDiffusion",
    embeddings: Conditioning,
    store: Store,
    beat: Callable[[], None] = lambda: None,
) -> NoiseSource:
    """What the config asks for; nothing is scored before the first groups come.

    Args:
        embeddings: of all classes, one row each.
        store: of the root; keeps noises that several series share, and optimised ones.
        beat: called while noises are chosen or waited for.
    Raises:
        InputError: noise shall be chosen, and the model's scheduler cannot be inverted.
    """
    config = plan.config
    shape = tuple(generator.latent_shape)
    if config.noise.strategy == "random":
        return random_noise(shape)
    from pipeline.generators.schedulers import ddim_pair  # diffusers: not for the random case

    renewing = Renewing(store, beat)
    scorer = Scorer(
        generator.predict,
        ddim_pair(generator.denoiser.pipeline.scheduler),
        guidance_scale=config.noise.guidance_scale,
        most_rows=production_batch(config),
        beat=renewing,
    )
    chooser = Chooser(plan, embeddings, scorer, shape)
    if not stored(config):
        return fresh_noise(chooser, batch_groups=config.shards.groups_per_batch)
    return banked_noise(chooser, store, beat=renewing)


def random_noise(shape: Sequence[int]) -> NoiseSource:
    """The noise of each group's own seed, unscored."""

    def draw(groups: Sequence[MixGroup]) -> tuple[Tensor, list[dict[str, Any]]]:
        record = {"strategy": "random", "stability": None}
        return initial_noise([group.seed for group in groups], shape), [record] * len(groups)

    return draw


def fresh_noise(chooser: Chooser, *, batch_groups: int) -> NoiseSource:
    """Selected for each group, whole batches at once; a short batch repeats its last group."""

    def choose(groups: Sequence[MixGroup]) -> tuple[Tensor, list[dict[str, Any]]]:
        numbers = [group.index for group in groups]
        padded = numbers + numbers[-1:] * (batch_groups - len(numbers))
        parts = chooser.select(padded)[: len(groups)]
        return _handed_out([(part, 0) for part in parts], chooser.shape)

    return choose


def banked_noise(chooser: Chooser, store: Store, *, beat: Renewing) -> NoiseSource:
    """Chosen once for each pair, or for the run, and handed out to its series in turn."""
    plan = chooser.plan
    noise = plan.config.noise

    def choose(number: Number) -> Part:
        if noise.strategy == "optimise":
            return chooser.optimise(number)
        return chooser.select([number])[0]

    bank = Bank(store, plan.digest, choose=choose, beat=beat)

    def entry(group: MixGroup) -> tuple[Part, int]:
        rank = group.index % plan.num_pairs
        if noise.bank == "run":
            part = bank.part(None)
            return part, (group.round + rank) % len(part)
        if noise.bank == "pair":
            return bank.part(rank), group.round
        return bank.part(group.index), 0

    def hand_out(groups: Sequence[MixGroup]) -> tuple[Tensor, list[dict[str, Any]]]:
        return _handed_out([entry(group) for group in groups], chooser.shape)

    return hand_out


def _handed_out(
    entries: Sequence[tuple[Part, int]], shape: Sequence[int]
) -> tuple[Tensor, list[dict[str, Any]]]:
    noise = torch.stack([part.noise(entry, shape) for part, entry in entries])
    return noise, [part.record(entry) for part, entry in entries]
