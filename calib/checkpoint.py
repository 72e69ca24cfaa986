"""Save and load checkpoints, between epochs and in the middle of an epoch."""

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
COMPLETE_NAME = re.compile(r"\d{6,}(-\d{8,})?")
CHECKPOINT_NAMES = re.compile(rf"{COMPLETE_NAME.pattern}|\.{COMPLETE_NAME.pattern}\{PARTIAL}")
OBJECTS = "objects"  # objects.json; objects.safetensors has its tensors

StateDict = Mapping[str, Any]  # tensors and plain values, as torch's `state_dict` gives them


class State(TypedDict):
    """state.json: the run that a checkpoint belongs to, and how far its training had come."""

    config: dict[str, object]  # the run's identity
    digest: str  # of settings and data
    stage: str
    epoch: int  # number of epochs done in this stage
    step: int  # number of steps done in the next epoch
    position: int  # number of epochs done over all stages
    seconds: float  # spent on these epochs
    begun_s: float  # seconds spent on the steps of the next epoch


class Checkpoint:
    """A complete checkpoint on disk.

    Args:
        path: folder made by `save_checkpoint`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: State = read_json(path / "state.json")

    def load_module(self, name: str, module: nn.Module) -> None:
        """Load a module's state. Raises InputError as `load_exactly` does."""
        load_exactly(module, self.path / f"{name}.safetensors")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file, copied into memory.

        A file that is still memory-mapped cannot be removed from a network drive.
        """
        path = self.path / f"{name}.safetensors"
        mapped = load_tensors(path)
        with _require_safetensors(path):
            return {name: tensor.clone() for name, tensor in mapped.items()}

    def objects(self) -> StateDict:
        """The state of the optimiser and other objects, as `save_checkpoint` got them, on the CPU.

        Raises:
            InputError: a file is damaged or does not hold such objects.
        """
        path, tensors = self.path / f"{OBJECTS}.json", self.tensors(OBJECTS)
        try:
            objects = from_json(read_json(path), tensors)
            if isinstance(objects, dict):
                return objects
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            pass  # RuntimeError: nested too deeply, or a tensor that cannot be channels-last
        raise InputError(
            "checkpoint", path, f"is damaged; remove {self.path} to train from the start"
        )


def save_checkpoint(
    folder: Path,
    position: int,
    *,
    step: int = 0,
    tensors: Mapping[str, Mapping[str, Tensor]],
    objects: StateDict,
    state: Mapping[str, object],
) -> Path:
    """Publish a checkpoint as `folder/NNNNNN`, then remove older checkpoints, but no other files.

    For a checkpoint in the middle of an epoch the step is appended to the name, so that it sorts
    between the checkpoints before and after that epoch. If the process is killed at any moment,
    the folder has the older checkpoint, the new one, or both.

    Args:
        position: number of epochs done over all stages; the complete checkpoint with the highest
            position is the latest.
        step: number of steps done in the next epoch.
        tensors: states of modules by name; each is written to NAME.safetensors.
        objects: further state, of tensors and plain values; see `to_json`.
        state: a `State`, without tensors.
    Raises:
        InputError: the folder is a symbolic link.
    """
    require_no_link("checkpoint", folder)
    target = folder / (f"{position:06d}-{step:08d}" if step else f"{position:06d}")
    if not target.exists():  # it exists if a run resumed from it and stopped before its first step
        partial = folder / f".{target.name}{PARTIAL}"
        remove_tree(partial)
        partial.mkdir(parents=True)
        for name, module_tensors in tensors.items():
            save_tensors(partial / f"{name}.safetensors", module_tensors)
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
    complete = sorted(p for p in paths if COMPLETE_NAME.fullmatch(p.name) and _is_folder(p))
    return Checkpoint(complete[-1]) if complete else None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def to_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Convert dictionaries, lists, tuples, tensors and plain values to JSON, as `from_json` reads.

    Args:
        tensors: gets the tensors, by the names that the JSON has in their places.
    Raises:
        TypeError: a value of another type.
    """
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value
            return {"tensor": name, "channels_last": _is_channels_last(value)}
        case Mapping():
            # As pairs: keys of a JSON object are strings, but an optimiser numbers its parameters.
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
        ValueError, KeyError, TypeError, RuntimeError: `to_json` writes no such JSON, or a tensor
            is missing.
    """
    match value:
        case {"tensor": str(name), "channels_last": bool(channels_last), **rest} if not rest:
            tensor = tensors[name]
            # In another memory format, sums may differ in their last bits.
            return tensor.to(memory_format=torch.channels_last) if channels_last else tensor
        case {"dict": list(pairs), **rest} if not rest:
            return {_key(key): from_json(item, tensors) for key, item in pairs}
        case {"tuple": list(items), **rest} if not rest:
            return tuple(from_json(item, tensors) for item in items)
        case list():
            return [from_json(item, tensors) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise ValueError("is not what a checkpoint contains")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load all tensors of a safetensors file to the CPU. Raises InputError for any other file."""
    check_size(path, max_bytes=MAX_TENSORS)
    with _require_safetensors(path):
        return load_file(path)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file atomically."""
    # Contiguous copies: safetensors stores neither memory formats nor shared storage.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(plain, metadata))


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata that `save_tensors` wrote; empty if the file is missing.

    Raises:
        InputError: the file is no safetensors file.
    """
    if not path.is_file():
        return {}
    check_size(path, max_bytes=MAX_TENSORS)
    with _require_safetensors(path), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def load_exactly(module: nn.Module, path: Path) -> None:
    """Load a module's state from safetensors; names and shapes of all tensors must agree.

    Raises:
        InputError: names the first tensor that is missing, unexpected or of another shape; or the
            file is no safetensors file.
    """
    stored, state = load_tensors(path), module.state_dict()
    for name in [*state, *stored]:
        shapes = [
            tuple(tensors[name].shape) if name in tensors else "none" for tensors in (stored, state)
        ]
        if shapes[0] != shapes[1]:
            remedy = f"the model has {shapes[1]}; was it trained for other classes or settings?"
            raise InputError(f"{path}: {name}", shapes[0], remedy)
    module.load_state_dict(stored)


@contextmanager
def _require_safetensors(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        SafetensorError,
        RuntimeError,
    ) as error:  # RuntimeError: too little memory for the tensors it declares
        remedy = f"is no complete safetensors file ({error}); restore it, or train this seed again"
        raise InputError("weights", path, remedy) from None


def _key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise ValueError(f"{type(key).__name__}: keys in a checkpoint are strings and numbers")
    return key


def _is_channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


# Computes the progress of the process with this index from that of all former processes.
Reshard = Callable[[Sequence[StateDict], int], StateDict]


def sum_in_first_process(tensors: Sequence[Tensor], index: int) -> Tensor:
    """Return the sum over processes in the first process and zeros in the others."""
    total = torch.stack(list(tensors)).sum(0)
    return total if index == 0 else torch.zeros_like(total)


class ProcessState(TypedDict):
    """The state of one process in the middle of an epoch."""

    random: dict[str, Tensor]
    buffers: dict[str, Tensor]
    kept: StateDict  # the stage's progress in the epoch


@dataclass(frozen=True)
class MidEpochState:
    """The step after which an epoch was stopped, and the state of each process then.

    Attributes:
        step: number of steps done in the epoch.
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
            progress: of the stage in this epoch: tensors on the CPU and plain values.
            modules: the stage's modules, by name.
        """
        state: ProcessState = {
            "random": random_state(accelerator.device),
            "buffers": {
                name: buffer.detach().cpu().clone()
                for name, (buffer, _) in _process_buffers(modules).items()
            },
            "kept": dict(progress),
        }
        return cls(step, gather_object([state]))

    @classmethod
    def from_checkpoint(cls, state: StateDict | None) -> "MidEpochState | None":
        """Restore from `state_dict`; None for a checkpoint that was written between two epochs."""
        return None if state is None else cls(**state)

    def state_dict(self) -> StateDict:
        return {"step": self.step, "processes": self.processes}

    def restore(
        self, modules: Mapping[str, nn.Module], accelerator: Accelerator, *, reshard: Reshard
    ) -> StateDict:
        """Restore the random state and the buffers of this process, and return its progress.

        If the number of processes has changed, statistics of batch norms become the mean over the
        former processes, the first process gets all sums, and an additional process keeps the
        random state with which it began the epoch.

        Args:
            reshard: computes this process's progress if the number of processes has changed.
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
    """The states of torch's global generators, of the CPU and of the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for kind in states.keys() - {"cpu"}:
        torch.get_device_module(kind).set_rng_state(states[kind])


def _process_buffers(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, bool]]:
    """Buffers that may differ between processes within an epoch, and whether each is a sum.

    Each process has its own batch norm statistics until the epoch ends. Non-persistent buffers hold
    sums over the epoch.
    """
    buffers = {}
    for module_name, module in modules.items():
        persistent = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() or name not in persistent:
                buffers[f"{module_name}.{name}"] = buffer, name not in persistent
    return buffers
