"""One shard from start to commit record: noise, images, labels, encoded, written, published."""

import hashlib
import os
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from data.root import Root
from data.shards import shard_name
from pipeline.batch import Batch, make_batch
from pipeline.models import Models, load_models
from pipeline.plan import BuildPlan, MixGroup, ShardSpec
from pipeline.provenance import library_versions
from pipeline.shard_writer import ShardWriter
from pipeline.stopwatch import Stopwatch

__all__ = ["Models", "generate_shard", "load_models"]


def generate_shard(
    spec: ShardSpec,
    plan: BuildPlan,
    *,
    models: Models,
    root: Root,
    beat: Callable[[], None] = lambda: None,
) -> Generator[None, None, dict[str, Any]]:
    """Make one shard and commit it; nothing has a final name before all of it exists.

    Images are encoded and written on threads while the next ones are generated. Once all are, it
    pauses: what is left, to hash and to publish, may go on on another thread while this one
    makes the next shard. Closed there, it leaves nothing.

    Args:
        beat: called after each batch, for whoever watches that work goes on.
    Returns:
        The commit record. Its `wall_seconds` are the worker's time, up to where it may go on to
        the next shard; `seconds` by stage overlap, "write" with the next shard's too.
    Raises:
        ValueError, FloatingPointError: an image came out flat or not as numbers; nothing is
            published.
    """
    clock = Stopwatch()
    with root.store.staging(f"{shard_name(spec.index)}.tar") as staged:
        features = _write(spec, plan, staged, models=models, clock=clock, beat=beat)
        tflop = models.work.shard_tflop(plan, spec) if models.work else None
        with clock.stage("stall"):  # until the shard before is published
            yield
        return _publish(spec, staged, features, root=root, clock=clock, tflop=tflop)


def _write(
    spec: ShardSpec,
    plan: BuildPlan,
    staged: Path,
    *,
    models: Models,
    clock: Stopwatch,
    beat: Callable[[], None],
) -> dict[str, Tensor]:
    """Generate all series into the staged tar; their features [groups, A, D] by encoder."""
    extension = plan.config.shards.image_format
    features: list[dict[str, Tensor]] = []
    with (
        staged.open("wb") as file,
        ShardWriter(file, extension=extension, clock=clock) as writer,
    ):
        for batch in _batches(spec, plan, models=models, clock=clock):
            for row, group in enumerate(batch.groups):
                labels = batch.annotation(row, models.annotator)
                record = group_record(group, plan, labels=labels, noise=batch.noise[row])
                writer.add(record, batch.encoding(row, extension))
            features.append(batch.features)
            beat()
    return {name: torch.cat([part[name] for part in features]) for name in features[0]}


def _batches(
    spec: ShardSpec, plan: BuildPlan, *, models: Models, clock: Stopwatch
) -> Iterator[Batch]:
    size = plan.config.shards.groups_per_batch
    for start in range(spec.start, spec.stop, size):
        groups = [plan.group(i) for i in range(start, min(start + size, spec.stop))]
        yield make_batch(groups, plan, models=models, clock=clock)


def group_record(
    group: MixGroup, plan: BuildPlan, *, labels: dict[str, Any], noise: dict[str, Any]
) -> dict[str, Any]:
    """What `KEY.json` says of one series.

    Args:
        labels: what `Annotator.annotate` gave.
    """
    record = {
        "group": group.index,
        "classes": list(group.classes),
        "names": [plan.class_names[k] for k in group.classes],
        "seed": group.seed,
        "alphas": group.alphas,
        "noise": noise,
        **labels,
    }
    if len(group.classes) > 2:
        record["mixture"] = group.mixture
    return record


def _publish(
    spec: ShardSpec,
    staged: Path,
    features: dict[str, Tensor],
    *,
    root: Root,
    clock: Stopwatch,
    tflop: float | None,
) -> dict[str, Any]:
    wall, stem = clock.wall, shard_name(spec.index)  # from here on the worker makes the next one
    with clock.stage("write"):
        with staged.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name, size = f"{stem}-{digest[:8]}.tar", staged.stat().st_size
        root.store.publish(staged, name)
        content = save({name: rows.half() for name, rows in features.items()})
        features_digest = hashlib.sha256(content).hexdigest()
        features_name = f"{stem}-{features_digest[:8]}.features.safetensors"
        root.store.put(features_name, content)
    record = {
        "spec": spec.digest,
        "shard": spec.index,
        "tar": name,
        "sha256": digest,
        "bytes": size,
        "features": {
            "name": features_name,
            "sha256": features_digest,
            "bytes": len(content),
        },
        "groups": spec.stop - spec.start,
        "first": spec.start,
        "seconds": dict(clock.seconds),
        "wall_seconds": wall,
        "tflop": tflop,
        "attempt": 1 + root.attempts(spec.index),
        "prototypes": root.prototypes_sha256,
        "worker": f"{socket.gethostname()}:{os.getpid()}",
        "versions": library_versions(),
    }
    root.commit(record)
    return record
