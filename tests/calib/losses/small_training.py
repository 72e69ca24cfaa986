"""A linear classifier trained for some steps, by one process or as one of several."""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from semix.calib.losses import build_training_loss
from semix.calib.losses.base import Outputs
from torch import Tensor, distributed

SAMPLES, CLASSES, FEATURES, BATCH, EPOCHS = 24, 4, 6, 8, 3

# Every loss whose value of a sample depends on others, or that keeps a state.
LOSSES: Mapping[str, dict[str, Any]] = {
    "mmce": {"weight": 5.0},
    "mmce_weighted": {"weight": 1.0, "variant": "paper"},
    "mdca": {"weight": 5.0, "base": "focal"},
    "crl": {"weight": 5.0},
    "ada_focal": {"bins": 5},
}


def trained(name: str, *, process: int = 0, processes: int = 1) -> dict[str, Any]:
    """Losses of the steps and the weights, the mean over processes; and the state of the loss."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=rng)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=rng)
    weights = torch.randn(FEATURES, CLASSES, generator=rng).requires_grad_()
    loss = build_training_loss(name, CLASSES, num_samples=SAMPLES, params=LOSSES[name])
    curve = []
    for _ in range(EPOCHS):
        for chosen in torch.randperm(SAMPLES, generator=rng).split(BATCH):
            own = chosen.chunk(processes)[process]
            value = loss(inputs[own] @ weights, targets[own], indices=own)
            (slope,) = torch.autograd.grad(value, weights)
            with torch.no_grad():
                weights -= 0.5 * _mean(slope, processes)
            curve.append(_mean(value.detach(), processes))
        found = Outputs((inputs @ weights).detach(), inputs, targets)
        loss.end_epoch(SimpleNamespace(outputs=lambda split, found=found: found))
    return {"curve": curve, "weights": weights.detach(), "state": loss.state_dict()}


def _mean(value: Tensor, processes: int) -> Tensor:
    """The mean over processes, as data-parallel training takes it."""
    if processes > 1:
        distributed.all_reduce(value)
    return value / processes


def main(process: int, processes: int, place: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meet", rank=process, world_size=processes
    )
    results = {name: trained(name, process=process, processes=processes) for name in LOSSES}
    torch.save(results, f"{place}/{process}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
