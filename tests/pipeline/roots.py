"""Roots that the real pipeline makes, and what they hold."""

from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from data.root import Root
from data.settings import load_settings
from data.tar import GroupSample, read_tar
from pipeline.config import BuildConfig
from pipeline.prototypes import ensure_prototypes
from pipeline.root import create_root
from pipeline.worker import main as worker


def altered(config: BuildConfig, *overrides: str) -> BuildConfig:
    return load_settings(BuildConfig, config.model_dump(), overrides)


def begun(config: BuildConfig, folder: Path | str) -> Root:
    """A root without shards; its prototypes are measured."""
    root = create_root(config, str(folder))
    ensure_prototypes(root, device="cpu")
    return root


def work(root: Root, *arguments: str) -> int:
    """Exit status of a worker here, on a CPU."""
    return worker([root.url, "--device", "cpu", *arguments])


def made(config: BuildConfig, folder: Path | str, *arguments: str) -> Root:
    """A root whose shards, or those that the worker's arguments name, a worker made."""
    root = begun(config, folder)
    assert work(root, *arguments) == 0
    return root


def samples(root: Root) -> dict[int, GroupSample]:
    """All series that are committed, by group."""
    found: dict[int, GroupSample] = {}
    for entry in root.entries():
        with root.store.open(entry.tar) as file:
            found |= {sample.record.group: sample for sample in read_tar(file)}
    return found


def features(root: Root, shard: int) -> dict[str, Tensor]:
    """float16 [G, A, D] of each encoder, as a shard stores them."""
    return load(root.store.get(root.committed()[shard].features.name))


def tars(root: Root) -> dict[str, str]:
    """SHA-256 of the images of each committed shard, by name."""
    return {entry.tar: entry.sha256 for entry in root.entries()}


def contents(root: Root, folder: str = "") -> dict[str, bytes]:
    """Everything in the store, or in a folder of it."""
    return root.store.get_many(root.store.list(folder))
