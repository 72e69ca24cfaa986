"""Checkpoints: between epochs and in the middle of one."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from semix.data.errors import InputError
from semix.data.files import (
    MAX_TENSORS,
    check_size,
    read_json,
    remove_tree,
    require_no_link,
    sync_folder,
    write_atomically,
)

PARTIAL = ".partial"
COMPLETE = re.compile(r"\d{6,}(-\d{8,})?")
CHECKPOINT_NAMES = re.compile(rf"{COMPLETE.pattern}|\.{COMPLETE.pattern}\{PARTIAL}")
OBJECTS = "objects"  # .json, and .safetensors for the tensors in it

StateDict = Mapping[str, Any]  # tensors and plain values, as torch's `state_dict` gives them


class State(TypedDict):
    """state.json: the run that a checkpoint belongs to, and its position in it."""

    config: dict[str, object]  # the run's identity
    digest: str  # of settings and data
    stage: str
    epoch: int  # epochs done of the stage
    step: int  # of the epoch that was begun then
    position: int  # epochs done over all stages
    seconds: float  # spent on them
    begun_s: float  # spent on the epoch that was begun then


class Checkpoint:
    """A complete checkpoint on disk.

    Args:
        path: folder made by `save_checkpoint`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: State = read_json(path / "state.json")

    def load_module(self, name: str, module: nn.Module) -> None:
        """Fill a module in place. Raises InputError as `load_exactly`."""
        load_exactly(module, self.path / f"{name}.safetensors")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Copies in memory, as a memory-mapped file cannot be removed from a network drive."""
        path = self.path / f"{name}.safetensors"
        mapped = load_tensors(path)
        with _refused_unless_safetensors(path):
            return {name: tensor.clone() for name, tensor in mapped.items()}

    def objects(self) -> StateDict:
        """Optimiser state and other objects that `save_checkpoint` wrote, on the CPU.

        Raises:
            InputError: a file is damaged, or of another form.
        """
        path, tensors = self.path / f"{OBJECTS}.json", self.tensors(OBJECTS)
        try:
            objects = from_json(read_json(path), tensors)
            if isinstance(objects, dict):
                return objects
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            pass  # RuntimeError: nested too deeply for Python, or no image to be channels-last
        raise InputError("checkpoint", path, f"is damaged; remove {self.path} to begin anew")


def save_checkpoint(
    folder: Path,
    position: int,
    *,
    step: int = 0,
    tensors: Mapping[str, Mapping[str, Tensor]],
    objects: StateDict,
    state: Mapping[str, object],
) -> Path:
    """Publish a checkpoint as `folder/NNNNNN`, then remove the older ones, and nothing else.

    In the middle of an epoch the step is appended to the name, so that the checkpoint sorts between
    those of before and after the epoch.

    A kill at any moment leaves the older checkpoint, both, or the new one.

    Args:
        position: epochs done over all stages; the highest complete one is the latest.
        step: steps done of the epoch that follows.
        tensors: state of modules; each becomes NAME.safetensors.
        objects: state dictionaries of tensors and plain values; see `to_json`.
        state: a `State`.
    Raises:
        InputError: the folder is a link.
    """
    require_no_link("checkpoint", folder)
    target = folder / (f"{position:06d}-{step:08d}" if step else f"{position:06d}")
    if not target.exists():  # it exists if a run resumed from it and stopped before a step
        partial = folder / f".{target.name}{PARTIAL}"
        remove_tree(partial)
        partial.mkdir(parents=True)
        for name, named in tensors.items():
            save_tensors(partial / f"{name}.safetensors", named)
        leaves: dict[str, Tensor] = {}
        tree = json.dumps(to_json(objects, leaves)).encode()
        save_tensors(partial / f"{OBJECTS}.safetensors", leaves)
        write_atomically(partial / f"{OBJECTS}.json", tree)
        write_atomically(partial / "state.json", json.dumps(state, indent=2).encode())
        partial.rename(target)
        sync_folder(folder)
    for other in folder.iterdir():
        if other != target and CHECKPOINT_NAMES.fullmatch(other.name):
            remove_tree(other)
    return target


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint in `folder`; None if there is none."""
    paths = folder.iterdir() if folder.is_dir() else ()
    complete = sorted(p for p in paths if COMPLETE.fullmatch(p.name) and _is_real_folder(p))
    return Checkpoint(complete[-1]) if complete else None


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def to_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Dictionaries, lists, tuples, tensors and plain values as JSON; `from_json` is its inverse.

    Args:
        tensors: filled with the tensors, under their names in the JSON.
    Raises:
        TypeError: a value of another kind.
    """
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value
            return {"tensor": name, "channels_last": _is_channels_last(value)}
        case Mapping():
            # Pairs, not a JSON object: an optimiser numbers its parameters, JSON keys are texts.
            pairs = [[_key(key), to_json(item, tensors)] for key, item in value.items()]
            return {"dict": pairs}
        case tuple():
            return {"tuple": [to_json(item, tensors) for item in value]}
        case list():
            return [to_json(item, tensors) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"{type(value).__name__}: a checkpoint holds only tensors and plain values")


def from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `to_json`.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: another form, or a missing tensor.
    """
    match value:
        case {"tensor": str(name), "channels_last": bool(channels_last), **rest} if not rest:
            tensor = tensors[name]
            # In another memory order, sums may differ in their last bits.
            return tensor.to(memory_format=torch.channels_last) if channels_last else tensor
        case {"dict": list(pairs), **rest} if not rest:
            return {_key(key): from_json(item, tensors) for key, item in pairs}
        case {"tuple": list(items), **rest} if not rest:
            return tuple(from_json(item, tensors) for item in items)
        case list():
            return [from_json(item, tensors) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise ValueError("no checkpoint has this form")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. Raises InputError for any other file."""
    check_size(path, max_bytes=MAX_TENSORS)
    with _refused_unless_safetensors(path):
        return load_file(path)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors atomically as safetensors."""
    # A copy in standard order: the file holds neither memory formats nor shared storage.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(plain, metadata))


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata that `save_tensors` wrote with the tensors; empty if the file is missing.

    Raises:
        InputError: the file is no safetensors file.
    """
    if not path.is_file():
        return {}
    check_size(path, max_bytes=MAX_TENSORS)
    with _refused_unless_safetensors(path), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def load_exactly(module: nn.Module, path: Path) -> None:
    """Fill a module from safetensors; the file must have every tensor, of the same shape.

    Raises:
        InputError: names the first tensor that is missing, left over or of another shape; or the
            file is no safetensors file.
    """
    stored, state = load_tensors(path), module.state_dict()
    for name in [*state, *stored]:
        shapes = [tuple(part[name].shape) if name in part else "none" for part in (stored, state)]
        if shapes[0] != shapes[1]:
            remedy = f"the model has {shapes[1]}; was it trained for other classes or settings?"
            raise InputError(f"{path}: {name}", shapes[0], remedy)
    module.load_state_dict(stored)


@contextmanager
def _refused_unless_safetensors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, RuntimeError) as error:  # or too little memory for what it declares
        remedy = f"is no whole safetensors file ({error}); restore it, or train this seed again"
        raise InputError("weights", path, remedy) from None


def _key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise ValueError(f"{type(key).__name__}: keys in a checkpoint are texts and numbers")
    return key


def _is_channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


# From the progress of all former processes, the progress of the process with this index.
Reshard = Callable[[Sequence[StateDict], int], StateDict]


def sum_in_first_process(parts: Sequence[Tensor], index: int) -> Tensor:
    """Give the sum over processes to the first process and zeros to the others."""
    total = torch.stack(list(parts)).sum(0)
    return total if index == 0 else torch.zeros_like(total)


class ProcessState(TypedDict):
    """The state of one process in the middle of an epoch."""

    random: dict[str, Tensor]
    buffers: dict[str, Tensor]
    kept: StateDict  # by the stage


@dataclass(frozen=True)
class MidEpochState:
    """Where an epoch was stopped, and the state of each process there.

    Attributes:
        step: steps done of the epoch.
    """

    step: int
    processes: list[ProcessState]

    @classmethod
    def gather(
        cls,
        step: int,
        progress: StateDict,
        *,
        modules: Mapping[str, nn.Module],
        accelerator: Accelerator,
    ) -> "MidEpochState":
        """Gather the state of all processes; every process must call.

        Args:
            progress: tensors on the CPU and plain values.
            modules: of the stage, by name.
        """
        state: ProcessState = {
            "random": random_state(accelerator.device),
            "buffers": {
                name: b.detach().cpu().clone() for name, (b, _) in _process_buffers(modules).items()
            },
            "kept": dict(progress),
        }
        return cls(step, gather_object([state]))

    @classmethod
    def from_checkpoint(cls, state: StateDict | None) -> "MidEpochState | None":
        """The state in a checkpoint; None if that was written between two epochs."""
        return None if state is None else cls(**state)

    def state_dict(self) -> StateDict:
        return {"step": self.step, "processes": self.processes}

    def restore(
        self, modules: Mapping[str, nn.Module], accelerator: Accelerator, *, reshard: Reshard
    ) -> StateDict:
        """Restore random state and buffers of this process; returns its progress.

        The number of processes may have changed: statistics of batch norms are then the mean over
        the former processes, the first process takes all sums, and an additional process keeps the
        random state that its epoch began with.

        Args:
            reshard: called then, for this process's part of all former processes' progress.
        """
        index, count = accelerator.process_index, len(self.processes)
        if index < count:
            set_random_state(self.processes[index]["random"])
        if count == accelerator.num_processes:
            state = self.processes[index]
            for name, (buffer, _) in _process_buffers(modules).items():
                buffer.copy_(state["buffers"][name])
            return state["kept"]
        for name, (buffer, is_sum) in _process_buffers(modules).items():
            values = [process["buffers"][name] for process in self.processes]
            buffer.copy_(
                sum_in_first_process(values, index) if is_sum else torch.stack(values).mean(0)
            )
        return reshard([process["kept"] for process in self.processes], index)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of torch's global generators, on the CPU and on the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for kind in states.keys() - {"cpu"}:
        torch.get_device_module(kind).set_rng_state(states[kind])


def _process_buffers(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, bool]]:
    """Buffers in which processes may differ within an epoch, and whether they are sums over it.

    Each process has its own batch norm statistics until the epoch ends; sums over an epoch are
    non-persistent buffers.
    """
    buffers = {}
    for part, module in modules.items():
        saved = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() or name not in saved:
                buffers[f"{part}.{name}"] = buffer, name not in saved
    return buffers
