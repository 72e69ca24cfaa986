"""Measures the gate: the same series exactly, fast, and exactly from other noises."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.fingerprint import hashed_seed
from data.root import Root
from pipeline.annotate import FEATURES
from pipeline.batch import Batch, make_batch
from pipeline.config import ApproximationConfig
from pipeline.fidelity.criteria import feature_criterion, weight_criteria
from pipeline.generators.latent_diffusion import LatentDiffusion
from pipeline.models import Models, load_models
from pipeline.noise.source import random_noise
from pipeline.plan import BuildPlan, MixGroup
from pipeline.stopwatch import Stopwatch


@dataclass(frozen=True)
class Recipes:
    """Two ways to the images of one plan; all but the sampling is the same in both."""

    exact: Models
    fast: Models


@dataclass
class Samples:
    """What is kept of one way's images: G series of A, features of D, k classes."""

    features: list[Tensor] = field(default_factory=list)  # [G, A, D] each
    weights: list[Tensor] = field(default_factory=list)  # [G, A, k] each, k = 1 for pairs
    seconds: list[float] = field(default_factory=list)  # of generation, a batch each

    def add(self, batch: Batch, models: Models, clock: Stopwatch) -> None:
        self.features.append(batch.features[FEATURES])
        for row, group in enumerate(batch.groups):
            found = batch.annotation(row, models.annotator)
            # Of two coordinates the second says nothing new.
            kept = found.get("coordinates") or [[weight] for weight in found["weights"]]
            order = torch.tensor(group.alphas).argsort(stable=True)
            self.weights.append(torch.tensor(kept)[order][None])
        self.seconds.append(clock.seconds["generate"])


def load_recipes(root: Root, plan: BuildPlan, *, device: str) -> Recipes:
    """Load the models once, for both; noise is each group's own, never chosen."""
    models = load_models(root, plan, device=device)
    fast = models.generator
    assert isinstance(fast, LatentDiffusion)
    exact_config = plan.config.generator.model_copy(update={"approximate": ApproximationConfig()})
    noise = random_noise(fast.latent_shape)
    exact = LatentDiffusion(fast.denoiser, exact_config)
    return Recipes(
        exact=replace(models, generator=exact, noise=noise), fast=replace(models, noise=noise)
    )


def measure_fidelity(plan: BuildPlan, recipes: Recipes) -> dict[str, Any]:
    """The verdict on the fast recipe, ready for JSON.

    Random noise serves in all, whatever the build itself chooses: the sampler is judged. Labels
    are measured on the images as they are, so what counts is the distribution of images and
    weights; distances to the exact image of the same noise are diagnostics. What classifiers
    make of the images is not measured here.
    """
    groups = gate_groups(plan)
    exact, fast, other = Samples(), Samples(), Samples()
    noise_ratios: list[Tensor] = []
    size = plan.config.shards.groups_per_batch
    for start in range(0, len(groups), size):
        batch = groups[start : start + size]
        true = _sample(batch, plan, recipes.exact, exact)
        quick = _sample(batch, plan, recipes.fast, fast)
        _sample(reseeded(batch, plan), plan, recipes.exact, other)
        noise_ratios.append(psnr(true.images, quick.images))
    return _verdict(exact, fast, other, psnr=torch.cat(noise_ratios), plan=plan)


def gate_groups(plan: BuildPlan) -> list[MixGroup]:
    """Series of the plan, drawn without replacement; all where it has no more."""
    wanted = min(plan.config.generator.approximate.gate_groups, plan.num_groups)
    rng = random.Random(hashed_seed(plan.config.mixing.seed, "gate"))
    return [plan.group(index) for index in sorted(rng.sample(range(plan.num_groups), wanted))]


def reseeded(groups: Sequence[MixGroup], plan: BuildPlan) -> list[MixGroup]:
    """The same series from other noises."""
    seed = plan.config.mixing.seed
    return [replace(group, seed=hashed_seed(seed, "gate", group.index)) for group in groups]


def psnr(first: np.ndarray, second: np.ndarray) -> Tensor:
    """Peak signal-to-noise ratio in dB of uint8 images [G, A, H, W, 3] -> [G A]; inf if equal."""
    difference = torch.from_numpy(first).double() - torch.from_numpy(second).double()
    return 10 * torch.log10(255**2 / difference.square().mean(dim=(2, 3, 4)).flatten())


def _sample(groups: list[MixGroup], plan: BuildPlan, models: Models, into: Samples) -> Batch:
    clock = Stopwatch()
    batch = make_batch(groups, plan, models=models, clock=clock)
    into.add(batch, models, clock)
    return batch


def _verdict(
    exact: Samples, fast: Samples, other: Samples, *, psnr: Tensor, plan: BuildPlan
) -> dict[str, Any]:
    ways = (exact, fast, other)
    true, quick, beside = (torch.cat(way.weights) for way in ways)
    seed = hashed_seed(plan.config.mixing.seed, "gate", "bootstrap")
    criteria = [
        *weight_criteria(true, quick, beside, seed=seed),
        feature_criterion(*(torch.cat(way.features).flatten(0, 1) for way in ways)),
    ]
    change = (quick - true).abs().flatten().double()
    noise = float(psnr.median())
    # The first batch of a recipe may compile; the median one does not.
    seconds = {"exact": float(np.median(exact.seconds)), "fast": float(np.median(fast.seconds))}
    return {
        "passed": all(criterion["passed"] for criterion in criteria),
        "criteria": criteria,
        "diagnostics": {
            "psnr_db_median": None if noise == float("inf") else noise,
            "weight_change_median": float(change.median()),
            "weight_change_95": float(change.quantile(0.95)),
        },
        "downstream": "not measured",
        "groups": len(true),
        "images": len(psnr),
        "seconds": seconds,
        "speedup": seconds["exact"] / seconds["fast"],
    }
