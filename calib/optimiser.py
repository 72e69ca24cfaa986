"""The optimiser of a stage, and its learning rate at each step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from semix.calib.config import OptimiserConfig


def build_optimiser(
    config: OptimiserConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    if config.name != "sgd":
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
        return kind(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def learning_rate(config: OptimiserConfig, step: int, *, steps: int, epochs: int) -> float:
    """The learning rate of a step; it depends on the step alone, so there is no state to save.

    Args:
        step: counted from 0, over all epochs.
        steps: steps per epoch.
    """
    rate = config.learning_rate
    if config.schedule == "multistep":
        rate *= config.factor ** sum(step >= steps * epoch for epoch in config.milestones)
    elif config.schedule == "cosine":
        rate *= (1 + math.cos(math.pi * step / (steps * epochs))) / 2
    return rate * min(1.0, (step + 1) / (config.warmup_steps + 1))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
