"""The middle of an epoch: what a stage holds there besides its modules and its optimiser."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from data.errors import InputError


@dataclass(frozen=True)
class Middle:
    """Where an epoch was stopped, and what each process has of its own there.

    Attributes:
        step: steps done of the epoch.
        processes: random state, buffers, and what the stage keeps besides, by process.
    """

    step: int
    processes: list[dict[str, Any]]

    @classmethod
    def here(
        cls,
        step: int,
        kept: Mapping[str, Any],
        *,
        modules: Mapping[str, nn.Module],
        accelerator: Accelerator,
    ) -> "Middle":
        """Gather it; every process must call.

        Args:
            kept: tensors on the CPU and plain values.
            modules: of the stage, by name.
        """
        own = {
            "random": random_state(accelerator.device),
            "buffers": {name: b.detach().cpu().clone() for name, b in _own(modules).items()},
            "kept": dict(kept),
        }
        return cls(step, gather_object([own]))

    @classmethod
    def of(cls, state: Mapping[str, Any] | None, accelerator: Accelerator) -> "Middle | None":
        """From a checkpoint; None if it was written between two epochs.

        Raises:
            InputError: as many processes as now did not write it.
        """
        if state is None:
            return None
        count = len(state["processes"])
        if count != accelerator.num_processes:
            remedy = f"an epoch was begun by {count} and stopped in its middle; go on with as many"
            raise InputError("processes", accelerator.num_processes, remedy)
        return cls(**state)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "processes": self.processes}

    def restore(self, modules: Mapping[str, nn.Module], accelerator: Accelerator) -> dict[str, Any]:
        """Put back random state and buffers of this process; returns `kept`."""
        own = self.processes[accelerator.process_index]
        for name, buffer in _own(modules).items():
            buffer.copy_(own["buffers"][name])
        set_random_state(own["random"])
        kept: dict[str, Any] = own["kept"]
        return kept


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of torch's global generators, on the CPU and on the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for kind in states.keys() - {"cpu"}:
        torch.get_device_module(kind).set_rng_state(states[kind])


def _own(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Buffers in which processes may differ within an epoch, or that no checkpoint holds.

    Statistics of batch norms are each process's own until the epoch ends; sums of an epoch are
    not in a module's state at all.
    """
    found = {}
    for part, module in modules.items():
        saved = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() or name not in saved:
                found[f"{part}.{name}"] = buffer
    return found
