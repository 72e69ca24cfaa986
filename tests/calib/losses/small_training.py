"""A linear classifier trained for some steps, by one process or as one of several."""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed

from semix.calib.config.loss import LOSSES as SETTINGS
from semix.calib.losses import build_training_loss
from semix.calib.losses.base import Outputs

SAMPLES, CLASSES, FEATURES, BATCH, EPOCHS = 24, 4, 6, 8, 3

# Every loss whose value of a sample depends on others, or that keeps a state.
LOSSES: Mapping[str, dict[str, Any]] = {
    "mmce": {"weight": 5.0},
    "mmce_weighted": {"weight": 1.0, "variant": "paper"},
    "mdca": {"weight": 5.0, "base": "focal"},
    "crl": {"weight": 5.0},
    "ada_focal": {"bins": 5},
}


def train(name: str, *, process: int = 0, processes: int = 1) -> dict[str, Any]:
    """Train; returns the curve and the weights, averaged over processes, and the loss's state."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=rng)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=rng)
    weights = torch.randn(FEATURES, CLASSES, generator=rng).requires_grad_()
    loss = build_training_loss(SETTINGS[name](**LOSSES[name]), CLASSES, num_samples=SAMPLES)
    curve = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(SAMPLES, generator=rng).split(BATCH):
            indices = batch.chunk(processes)[process]
            value = loss(inputs[indices] @ weights, targets[indices], indices=indices)
            (slope,) = torch.autograd.grad(value, weights)
            with torch.no_grad():
                weights -= 0.5 * _mean(slope, processes)
            curve.append(_mean(value.detach(), processes))
        outputs = Outputs((inputs @ weights).detach(), inputs, targets)
        loss.end_epoch(SimpleNamespace(outputs=lambda split, outputs=outputs: outputs))
    return {"curve": curve, "weights": weights.detach(), "state": loss.state_dict()}


def _mean(value: Tensor, processes: int) -> Tensor:
    """The mean over processes, as data-parallel training takes it."""
    if processes > 1:
        distributed.all_reduce(value)
    return value / processes


def main(process: int, processes: int, folder: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=process, world_size=processes
    )
    results = {name: train(name, process=process, processes=processes) for name in LOSSES}
    torch.save(results, f"{folder}/{process}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
