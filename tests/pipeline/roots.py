"""Roots that the real pipeline makes, and what they hold."""

from hashlib import sha256
from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from semix.data.formats import PROTOTYPES, SeriesLabels
from semix.data.label_sets import LabelSet
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.tar import GroupSample, read_tar
from semix.pipeline.bake import bake_shard, open_baked
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan, build_of
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.relabel import (
    IMAGES,
    ensure_set_prototypes,
    label_stored,
    plan_set,
    relabelled_config,
)
from semix.pipeline.root import create_build
from semix.pipeline.worker import main as worker
from tests.handmade import committed


def create_root(config: BuildConfig, url: str) -> Root:
    """The root that a build of this config starts or continues."""
    return create_build(config, url, device="cpu").root


def plan_of(root: Root) -> BuildPlan:
    return build_of(root).plan


def config_of(root: Root) -> BuildConfig:
    return build_of(root).config


def altered(config: BuildConfig, *overrides: str) -> BuildConfig:
    return load_settings(BuildConfig, config.model_dump(), overrides)


def begun(config: BuildConfig, folder: Path | str) -> Root:
    """A root without shards; its prototypes are measured."""
    root = create_root(config, str(folder))
    ensure_prototypes(build_of(root), device="cpu")
    return root


def work(root: Root, *arguments: str) -> int:
    """Run a worker in this process on a CPU; returns its exit status."""
    return worker([root.url, "--device", "cpu", *arguments])


def made(config: BuildConfig, folder: Path | str, *arguments: str) -> Root:
    """A root whose shards a worker made: all of them, or those that its arguments name."""
    root = begun(config, folder)
    assert work(root, *arguments) == 0
    return root


def samples(root: Root) -> dict[int, GroupSample]:
    """All series that are committed, by group."""
    result: dict[int, GroupSample] = {}
    for entry in root.records():
        with root.store.open(entry.tar) as file:
            result |= {sample.record.group: sample for sample in read_tar(file)}
    return result


def features(root: Root, shard: int) -> dict[str, Tensor]:
    """float16 [G, A, D] of each encoder, as a shard stores them."""
    return load(root.store.get(committed(root)[shard].features.name))


def tars(root: Root) -> dict[str, str]:
    """SHA-256 of the images of each committed shard, by name."""
    return {entry.tar: entry.sha256 for entry in root.records()}


def contents(root: Root, folder: str = "") -> dict[str, bytes]:
    """Everything in the store, or in a folder of it."""
    return root.store.get_many(root.store.list(folder))


def begin_set(root: Root, *overrides: str) -> LabelSet:
    """A label set with other settings of the annotation: measured prototypes, no labels yet."""
    labels = plan_set(root, relabelled_config(root, [f"annotation.{o}" for o in overrides]))
    ensure_set_prototypes(labels, device="cpu")
    return labels


def relabel(root: Root, *overrides: str) -> LabelSet:
    """Label everything: from stored features, or by a worker where images must be read."""
    labels = begin_set(root, *overrides)
    if labels.record.features == IMAGES:
        assert work(root, "--labels", labels.digest) == 0
    else:
        label_stored(labels, labels.missing(), plan=build_of(labels.root).plan)
    return labels


def by_group(labels: LabelSet) -> dict[int, SeriesLabels]:
    return {g: series for shard in labels.done() for g, series in labels.labels(shard).items()}


def bake(root: Root, config: BuildConfig, labels: LabelSet | None, url: Path) -> Root:
    """Bake all labelled shards into a root of its own."""
    target, plan = open_baked(root, config, labels, str(url)), plan_of(root)
    digest = sha256(target.store.get(PROTOTYPES)).hexdigest()
    for shard in root.done() if labels is None else labels.done():
        if not target.is_committed(shard):
            assert bake_shard(
                shard, source=root, labels=labels, target=target, plan=plan, prototypes=digest
            )
    return target
