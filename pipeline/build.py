"""One shard from start to commit record: noise, images, labels, encoded, written, published."""

import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from data.images import LOSSY, decode_image, encode_image
from data.root import Root
from data.shards import shard_name
from pipeline.annotate import Annotator
from pipeline.mixing import mix_groups
from pipeline.models import Models, load_models
from pipeline.pixels import resized
from pipeline.plan import BuildPlan, MixGroup, ShardSpec
from pipeline.provenance import library_versions
from pipeline.shard_writer import ShardWriter
from pipeline.stopwatch import Stopwatch

__all__ = ["Models", "generate_shard", "load_models"]


@dataclass(frozen=True)
class Batch:
    """Some groups, generated and labelled.

    Attributes:
        images: as stored, uint8 [G, A, H, W, 3] on the CPU.
        encoded: their bytes where the format is lossy, since CLIP must see what is stored.
        noise: the `noise` part of each record.
    """

    groups: list[MixGroup]
    images: np.ndarray
    encoded: list[list[bytes]] | None
    features: Tensor  # [G, A, D]
    noise: list[dict[str, Any]]


def generate_shard(
    spec: ShardSpec,
    plan: BuildPlan,
    *,
    models: Models,
    root: Root,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Make one shard and commit it; nothing has a final name before all of it exists.

    Images are encoded and written on threads while the next ones are generated.

    Args:
        beat: called after each batch, for whoever watches that work goes on.
    Returns:
        The commit record.
    Raises:
        ValueError, FloatingPointError: an image came out flat or not as numbers; nothing is
            published.
    """
    clock = Stopwatch()
    extension = plan.config.shards.image_format
    features: list[Tensor] = []
    with root.store.staging(f"{shard_name(spec.index)}.tar") as staged:
        with (
            staged.open("wb") as file,
            ShardWriter(file, extension=extension, clock=clock) as writer,
        ):
            for batch in _batches(spec, plan, models=models, clock=clock):
                for row, group in enumerate(batch.groups):
                    record = group_record(
                        group,
                        plan,
                        features=batch.features[row],
                        noise=batch.noise[row],
                        annotator=models.annotator,
                    )
                    writer.add(record, _encoding(batch, row, extension))
                features.append(batch.features)
                beat()
        tflop = models.work.shard_tflop(plan, spec) if models.work else None
        return _publish(spec, staged, torch.cat(features), root=root, clock=clock, tflop=tflop)


def _batches(
    spec: ShardSpec, plan: BuildPlan, *, models: Models, clock: Stopwatch
) -> Iterator[Batch]:
    size = plan.config.shards.groups_per_batch
    for start in range(spec.start, spec.stop, size):
        groups = [plan.group(i) for i in range(start, min(start + size, spec.stop))]
        yield make_batch(groups, plan, models=models, clock=clock)


@torch.inference_mode()
def make_batch(
    groups: list[MixGroup], plan: BuildPlan, *, models: Models, clock: Stopwatch
) -> Batch:
    """Generate some groups and encode them with CLIP, where they are: on the device."""
    settings = plan.config.shards
    with clock.stage("noise"):
        noise, notes = models.noise(groups)
    with clock.stage("generate"):
        images = mix_groups(
            groups,
            noise,
            embeddings=models.embeddings,
            generator=models.generator,
            batch_groups=settings.groups_per_batch,
            interpolation=plan.config.mixing.interpolation,
        )
        images = resized(images, settings.store_size)
        stored = images.cpu().numpy()
    encoded = None
    if settings.image_format in LOSSY:
        with clock.stage("encode"):
            encoded = [encode_series(series, settings.image_format) for series in stored]
        images = torch.from_numpy(
            np.stack([[decode_image(image) for image in series] for series in encoded])
        )
    with clock.stage("annotate"):
        features = models.annotator.features(images.flatten(0, 1))
    return Batch(groups, stored, encoded, features.unflatten(0, images.shape[:2]), notes)


def _encoding(batch: Batch, row: int, extension: str) -> Callable[[], list[bytes]]:
    """The work that is left for an encoding thread."""
    if batch.encoded is not None:
        return partial(list, batch.encoded[row])
    return partial(encode_series, batch.images[row], extension)


def encode_series(series: np.ndarray, extension: str) -> list[bytes]:
    """uint8 [A, H, W, 3] to the bytes of A files."""
    return [encode_image(image, extension) for image in series]


def group_record(
    group: MixGroup,
    plan: BuildPlan,
    *,
    features: Tensor,
    noise: dict[str, Any],
    annotator: Annotator,
) -> dict[str, Any]:
    """What `KEY.json` says of one series, from the CLIP features [A, D] of its images."""
    coordinates, probabilities = annotator.label(features, group.classes)
    record = {
        "group": group.index,
        "classes": list(group.classes),
        "names": [plan.class_names[k] for k in group.classes],
        "seed": group.seed,
        "alphas": group.alphas,
        "weights": coordinates[:, 0].tolist(),
        "labels": [
            [[k, float(p)] for k, p in zip(group.classes, row, strict=True)]
            for row in probabilities
        ],
        "noise": noise,
    }
    if len(group.classes) > 2:
        record |= {"mixture": group.mixture, "coordinates": coordinates.tolist()}
    return record


def _publish(
    spec: ShardSpec,
    staged: Path,
    features: Tensor,
    *,
    root: Root,
    clock: Stopwatch,
    tflop: float | None,
) -> dict[str, Any]:
    stem = shard_name(spec.index)
    with clock.stage("write"):
        with staged.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name, size = f"{stem}-{digest[:8]}.tar", staged.stat().st_size
        root.store.publish(staged, name)
        content = save({"features": features.half()})
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
        "wall_seconds": clock.wall,
        "tflop": tflop,
        "attempt": 1 + len(root.failures().get(spec.index, [])),
        "worker": f"{socket.gethostname()}:{os.getpid()}",
        "versions": library_versions(),
    }
    root.commit(record)
    return record
