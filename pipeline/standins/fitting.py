"""Shared by the trainings: the images in memory, the batches, and the optimisation loop."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from semix.data.errors import InputError
from semix.data.splits import ImageSplit
from semix.pipeline.standins.recipe import TrainingStage

WARM_UP_STEPS = 50


@dataclass(frozen=True)
class TrainingImages:
    """The training images of the small models."""

    pixels: Tensor  # float32 [N,3,S,S] in [-1, 1]
    targets: Tensor  # int64 [N]

    @property
    def size(self) -> int:
        return self.pixels.shape[-1]

    @property
    def device(self) -> torch.device:
        """The device of training; random draws and targets stay on the CPU."""
        return self.pixels.device

    def on(self, device: str) -> "TrainingImages":
        return replace(self, pixels=self.pixels.to(device))


def load_images(split: ImageSplit, *, limit: int) -> TrainingImages:
    """Load at most `limit` images of the split: the first ones of each class, evenly.

    Raises:
        InputError: all of them are the same picture.
    """
    targets = np.asarray(split.targets)
    rank = np.empty(len(targets), dtype=np.int64)  # position of an image within its class
    for label in np.unique(targets):
        of_class = np.flatnonzero(targets == label)
        rank[of_class] = np.arange(len(of_class))
    indices = np.sort(np.lexsort((targets, rank))[:limit])
    pixels = torch.from_numpy(split.images(indices)).permute(0, 3, 1, 2)
    if (pixels == pixels[0]).all():
        raise InputError("train", f"{len(pixels)} equal images", "give pictures that differ")
    return TrainingImages(
        (pixels.float() / 127.5 - 1).contiguous(), torch.from_numpy(targets[indices])
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Initialise modules from `seed`; afterwards restore the global random state."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch the GPUs as well
    try:
        yield
    finally:
        torch.set_rng_state(before)


def batches(count: int, size: int, *, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield indices [size] below `count` without end; every index comes once per round."""
    indices = torch.empty(0, dtype=torch.int64)
    while True:
        while len(indices) < size:
            indices = torch.cat([indices, torch.randperm(count, generator=rng)])
        yield indices[:size]
        indices = indices[size:]


def fit(
    modules: Sequence[nn.Module],
    loss: Callable[[], Tensor],
    *,
    stage: TrainingStage,
    average_decay: float,
) -> Iterator[int]:
    """Train `modules` together on `loss()`; yield the number of steps done, from 0 on.

    AdamW, warm-up and cosine decay, gradient norm at most 1; on a GPU with torch's autocast to
    bfloat16. After the last step the modules hold the moving average of their weights, in
    evaluation mode and without gradients.
    """
    parameters = [p for module in modules for p in module.parameters()]
    averages = [p.detach().clone() for p in parameters]
    optimiser = torch.optim.AdamW(parameters, lr=stage.learning_rate, fused=True)
    yield 0
    for step in range(stage.steps):
        for group in optimiser.param_groups:
            group["lr"] = stage.learning_rate * _rate(step, stage.steps)
        optimiser.zero_grad()
        with autocast(parameters[0].device):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        # a lower decay at first, so that the untrained weights are forgotten
        decay = min(average_decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(averages, [p.detach() for p in parameters], 1 - decay)
        yield step + 1
    for parameter, average in zip(parameters, averages, strict=True):
        parameter.data.copy_(average)
    for module in modules:
        module.eval().requires_grad_(False)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _rate(step: int, steps: int) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then half a cosine."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 4))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))
