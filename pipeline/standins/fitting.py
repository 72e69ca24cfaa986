"""Shared by the trainings: the images in memory, the batches, and the optimisation loop."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from semix.data.errors import InputError
from semix.data.files import write_atomically
from semix.data.pace import Throttle
from semix.data.splits import ImageSplit
from semix.pipeline.standins.recipe import TrainingStage

WARM_UP_STEPS = 50
SECONDS_BETWEEN_STATES = 300.0


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


class Batches:
    """Indices [size] below `count` without end; every index comes once per round.

    Attributes:
        rng: of all random numbers of a training, so that its state and `pending` continue it.
    """

    def __init__(self, count: int, size: int, *, rng: torch.Generator) -> None:
        self.count, self.size, self.rng = count, size, rng
        self.pending = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> Tensor:
        while len(self.pending) < self.size:
            order = torch.randperm(self.count, generator=self.rng)
            self.pending = torch.cat([self.pending, order])
        batch, self.pending = self.pending[: self.size], self.pending[self.size :]
        return batch


def fit(
    modules: Sequence[nn.Module],
    loss: Callable[[], Tensor],
    *,
    stage: TrainingStage,
    average_decay: float,
    draw: Batches,
    state: Path | None = None,
) -> Iterator[int]:
    """Train `modules` together on `loss()`; yield the number of steps done, from 0 on.

    AdamW, warm-up and cosine decay, gradient norm at most 1; on a GPU with torch's autocast to
    bfloat16. After the last step the modules hold the moving average of their weights, in
    evaluation mode and without gradients.

    Args:
        draw: the batches of the loss, which draws all its random numbers from their `rng`.
        state: a file for the state of the training, from which it goes on bit by bit.
    """
    parameters = [p for module in modules for p in module.parameters()]
    averages = [p.detach().clone() for p in parameters]
    optimiser = torch.optim.AdamW(parameters, lr=stage.learning_rate, fused=True)
    training = _Training(parameters, averages, optimiser, draw)
    begun = training.load(state) if state is not None and state.is_file() else 0
    throttle = Throttle(SECONDS_BETWEEN_STATES)
    yield begun
    for step in range(begun, stage.steps):
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
        if state is not None and throttle.is_due():
            training.save(state, step + 1)
            throttle.restart()
        yield step + 1
    for parameter, average in zip(parameters, averages, strict=True):
        parameter.data.copy_(average)
    for module in modules:
        module.eval().requires_grad_(False)


@dataclass(frozen=True)
class _Training:
    """What a training needs to go on, as the tensors of one file."""

    parameters: list[nn.Parameter]
    averages: list[Tensor]
    optimiser: torch.optim.Optimizer
    draw: Batches

    def save(self, path: Path, steps: int) -> None:
        tensors = {
            "steps": torch.tensor(steps),
            "rng": self.draw.rng.get_state(),
            "pending": self.draw.pending,
        }
        of_optimiser = self.optimiser.state_dict()["state"]
        for index, parameter in enumerate(self.parameters):
            tensors[f"parameter.{index}"] = parameter.detach()
            tensors[f"average.{index}"] = self.averages[index]
            tensors |= {f"{key}.{index}": value for key, value in of_optimiser[index].items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Copies: tied weights share storage, which safetensors refuses.
        write_atomically(path, save({name: t.cpu().clone() for name, t in tensors.items()}))

    @torch.no_grad()
    def load(self, path: Path) -> int:
        """Take over the state; returns the number of steps done."""
        tensors = load_file(path)
        self.draw.rng.set_state(tensors["rng"])
        self.draw.pending = tensors["pending"]
        state = {}
        for index, parameter in enumerate(self.parameters):
            parameter.copy_(tensors[f"parameter.{index}"])
            self.averages[index].copy_(tensors[f"average.{index}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            state[index] = {key: tensors[f"{key}.{index}"] for key in keys}
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": state, "param_groups": groups})
        return int(tensors["steps"])


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU; the denoiser, which takes longest, is as fast in float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _rate(step: int, steps: int) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then half a cosine."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 4))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))
