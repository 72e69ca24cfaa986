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
from semix.data.errors import InputError
from semix.data.files import (
    MOST_TENSORS,
    read_json,
    refuse_larger,
    remove_tree,
    require_no_link,
    sync_folder,
    write_atomically,
)
from torch import Tensor, nn

PARTIAL = ".partial"
COMPLETE = re.compile(r"\d{6,}(-\d{8,})?")
OURS = re.compile(rf"{COMPLETE.pattern}|\.{COMPLETE.pattern}\{PARTIAL}")
OBJECTS = "objects"  # .json, and .safetensors for the tensors in it

StateDict = Mapping[str, Any]  # tensors and plain values, as torch's `state_dict` gives them


class State(TypedDict):
    """state.json: whose a checkpoint is, and where."""

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
        """In memory: a file that is mapped cannot be removed from a network's disk."""
        path = self.path / f"{name}.safetensors"
        found = load_tensors(path)
        with _refused_unless_safetensors(path):
            return {name: tensor.clone() for name, tensor in found.items()}

    def objects(self) -> StateDict:
        """Optimiser state and the like, on the CPU, as `save_checkpoint` took it.

        Raises:
            InputError: a file of them is damaged, or of another form.
        """
        path, tensors = self.path / f"{OBJECTS}.json", self.tensors(OBJECTS)
        try:
            found = from_json(read_json(path), tensors)
            if isinstance(found, dict):
                return found
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

    In the middle of an epoch its name goes on with the step, so that it comes after the one from
    before the epoch and before the one after.

    A kill at any moment leaves the older checkpoint, both, or the new one.

    Args:
        position: epochs done over all stages; the highest complete one is the latest.
        step: steps done of the epoch that was begun then.
        tensors: state of modules; each becomes NAME.safetensors.
        objects: state dictionaries of tensors and plain values; see `to_json`.
        state: a `State`.
    Raises:
        InputError: the folder is a link.
    """
    require_no_link("checkpoint", folder)
    target = folder / (f"{position:06d}-{step:08d}" if step else f"{position:06d}")
    if not target.exists():  # else a run that went on from here came back to it
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
        if other != target and OURS.fullmatch(other.name):
            remove_tree(other)
    return target


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint in `folder`; None if there is none."""
    found = folder.iterdir() if folder.is_dir() else ()
    complete = sorted(p for p in found if COMPLETE.fullmatch(p.name) and _is_real_folder(p))
    return Checkpoint(complete[-1]) if complete else None


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def to_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Dictionaries, lists, tuples, tensors and plain values as JSON; `from_json` is its inverse.

    Args:
        tensors: takes the tensors in, under the names that the JSON has for them.
    Raises:
        TypeError: a value of another kind.
    """
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value
            return {"tensor": name, "channels_last": _is_channels_last(value)}
        case Mapping():
            # Not JSON's own objects: an optimiser numbers its parameters, and those know texts.
            pairs = [[_key(key), to_json(item, tensors)] for key, item in value.items()]
            return {"dict": pairs}
        case tuple():
            return {"tuple": [to_json(item, tensors) for item in value]}
        case list():
            return [to_json(item, tensors) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"{type(value).__name__}: a checkpoint holds tensors and plain values alone")


def from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `to_json` was given.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: another form, or a tensor that is not there.
    """
    match value:
        case {"tensor": str(name), "channels_last": bool(channels_last), **rest} if not rest:
            tensor = tensors[name]
            # In another order of memory, sums may end in other last bits.
            return tensor.to(memory_format=torch.channels_last) if channels_last else tensor
        case {"dict": list(pairs), **rest} if not rest:
            return {_key(key): from_json(item, tensors) for key, item in pairs}
        case {"tuple": list(items), **rest} if not rest:
            return tuple(from_json(item, tensors) for item in items)
        case list():
            return [from_json(item, tensors) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise ValueError("of a form that no checkpoint has")


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU. Raises InputError for any other file."""
    refuse_larger(path, most=MOST_TENSORS)
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
    """What `save_tensors` noted with the tensors; empty where there is no such file.

    Raises:
        InputError: no safetensors file.
    """
    if not path.is_file():
        return {}
    refuse_larger(path, most=MOST_TENSORS)
    with _refused_unless_safetensors(path), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def load_exactly(module: nn.Module, path: Path) -> None:
    """Fill a module from safetensors; every tensor must be there, of the same shape.

    Raises:
        InputError: names the first tensor that is missing, left over or of another shape; or no
            safetensors file.
    """
    found, own = load_tensors(path), module.state_dict()
    for name in [*own, *found]:
        shapes = [tuple(part[name].shape) if name in part else "none" for part in (found, own)]
        if shapes[0] != shapes[1]:
            remedy = f"the model has {shapes[1]}; was it trained for other classes or settings?"
            raise InputError(f"{path}: {name}", shapes[0], remedy)
    module.load_state_dict(found)


@contextmanager
def _refused_unless_safetensors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, RuntimeError) as error:  # or no memory for what it claims to hold
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


# What the process of this index has of what all had, by the stage.
Share = Callable[[Sequence[StateDict], int], StateDict]


def added(parts: Sequence[Tensor], index: int) -> Tensor:
    """A sum over processes: all of it in the first, nothing in the others."""
    total = torch.stack(list(parts)).sum(0)
    return total if index == 0 else torch.zeros_like(total)


class OfProcess(TypedDict):
    """What a process alone has in the middle of an epoch."""

    random: dict[str, Tensor]
    buffers: dict[str, Tensor]
    kept: StateDict  # by the stage


@dataclass(frozen=True)
class Middle:
    """Where an epoch was stopped, and what each process has of its own there.

    Attributes:
        step: steps done of the epoch.
    """

    step: int
    processes: list[OfProcess]

    @classmethod
    def here(
        cls,
        step: int,
        kept: StateDict,
        *,
        modules: Mapping[str, nn.Module],
        accelerator: Accelerator,
    ) -> "Middle":
        """Gather it; every process must call.

        Args:
            kept: tensors on the CPU and plain values.
            modules: of the stage, by name.
        """
        own: OfProcess = {
            "random": random_state(accelerator.device),
            "buffers": {name: b.detach().cpu().clone() for name, (b, _) in _own(modules).items()},
            "kept": dict(kept),
        }
        return cls(step, gather_object([own]))

    @classmethod
    def of(cls, state: StateDict | None) -> "Middle | None":
        """From a checkpoint; None if it was written between two epochs."""
        return None if state is None else cls(**state)

    def state_dict(self) -> StateDict:
        return {"step": self.step, "processes": self.processes}

    def restore(
        self, modules: Mapping[str, nn.Module], accelerator: Accelerator, *, share: Share
    ) -> StateDict:
        """Put back random state and buffers of this process; returns `kept`.

        Another number of processes may go on than stopped: statistics of batch norms are then the
        mean of all, sums are the first process's, and a process that was not there before keeps
        the random state that its epoch began with.

        Args:
            share: what a process has of all processes' `kept`, then.
        """
        index, before = accelerator.process_index, len(self.processes)
        if index < before:
            set_random_state(self.processes[index]["random"])
        if before == accelerator.num_processes:
            own = self.processes[index]
            for name, (buffer, _) in _own(modules).items():
                buffer.copy_(own["buffers"][name])
            return own["kept"]
        for name, (buffer, is_sum) in _own(modules).items():
            all_had = [process["buffers"][name] for process in self.processes]
            buffer.copy_(added(all_had, index) if is_sum else torch.stack(all_had).mean(0))
        return share([process["kept"] for process in self.processes], index)


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


def _own(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, bool]]:
    """Buffers in which processes may differ within an epoch, and whether they are sums of it.

    Statistics of batch norms are each process's own until the epoch ends; sums of an epoch are
    not in a module's state at all.
    """
    found = {}
    for part, module in modules.items():
        saved = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() or name not in saved:
                found[f"{part}.{name}"] = buffer, name not in saved
    return found
