"""Checkpoints that are one unit: a folder that appears complete under its name or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from data.errors import InputError
from data.files import sync_folder, write_atomically

PARTIAL = ".partial"


class Checkpoint:
    """A complete checkpoint on disk.

    Args:
        path: folder made by `save_checkpoint`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = json.loads((path / "state.json").read_bytes())

    def load_module(self, name: str, module: nn.Module) -> None:
        """Fill a module in place. Raises InputError as `load_exactly`."""
        load_exactly(module, self.path / f"{name}.safetensors")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """In memory: a file that is mapped cannot be removed from a network's disk."""
        found = load_file(self.path / f"{name}.safetensors")
        return {name: tensor.clone() for name, tensor in found.items()}

    def objects(self) -> dict[str, Any]:
        """Optimiser state and the like, on the CPU. Only plain values and tensors are read."""
        path = self.path / "objects.pt"
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return loaded


def save_checkpoint(
    folder: Path,
    position: int,
    *,
    step: int = 0,
    tensors: Mapping[str, Mapping[str, Tensor]],
    objects: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Path:
    """Publish a checkpoint as `folder/NNNNNN`, then remove the older ones.

    In the middle of an epoch its name goes on with the step, so that it comes after the one from
    before the epoch and before the one after.

    A kill at any moment leaves the older checkpoint, both, or the new one.

    Args:
        position: epochs done over all stages; the highest complete one is the latest.
        step: steps done of the epoch that was begun then.
        tensors: state of modules; each becomes NAME.safetensors.
        objects: state dictionaries of tensors and plain values.
        state: JSON values.
    """
    target = folder / (f"{position:06d}-{step:08d}" if step else f"{position:06d}")
    if not target.exists():  # else a run that went on from here came back to it
        partial = folder / f".{target.name}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, named in tensors.items():
            save_tensors(partial / f"{name}.safetensors", named)
        with (partial / "objects.pt").open("wb") as file:
            torch.save(dict(objects), file)
            file.flush()
            os.fsync(file.fileno())
        write_atomically(partial / "state.json", json.dumps(state, indent=2).encode())
        partial.rename(target)
        sync_folder(folder)
    for other in folder.iterdir():
        if other != target:
            shutil.rmtree(other, ignore_errors=True)  # what stays costs room, not the run
    return target


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint in `folder`; None if there is none."""
    complete = sorted(path for path in folder.glob("[0-9]*") if path.is_dir())
    return Checkpoint(complete[-1]) if complete else None


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors atomically as safetensors."""
    # A copy in standard order: the file holds neither memory formats nor shared storage.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(plain, metadata))


def read_metadata(path: Path) -> dict[str, str]:
    """What `save_tensors` noted with the tensors; empty where there is no such file."""
    if not path.is_file():
        return {}
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def load_exactly(module: nn.Module, path: Path) -> None:
    """Fill a module from safetensors; every tensor must be there, of the same shape.

    Raises:
        InputError: names the first tensor that is missing, left over or of another shape.
    """
    found, own = load_file(path), module.state_dict()
    for name in [*own, *found]:
        shapes = [tuple(part[name].shape) if name in part else "none" for part in (found, own)]
        if shapes[0] != shapes[1]:
            remedy = f"the model has {shapes[1]}; was it trained for other classes or settings?"
            raise InputError(f"{path}: {name}", shapes[0], remedy)
    module.load_state_dict(found)
