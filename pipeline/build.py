"""One shard from start to commit record: generate, annotate, encode, write, publish."""

import hashlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from data.errors import InputError
from data.images import encode_image, resizer
from data.labels import soft_labels
from data.root import Root
from data.shards import GroupSample, shard_name, write_tar
from pipeline.annotate import Annotator
from pipeline.clip import ClipEncoder
from pipeline.conditioning import prompts
from pipeline.device import resolve_device
from pipeline.generators import Generator, load_generator
from pipeline.mixing import mix_groups
from pipeline.plan import BuildPlan, MixGroup, ShardSpec
from pipeline.provenance import library_versions
from pipeline.root import read_prototypes


class Stopwatch:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


@dataclass(frozen=True)
class Models:
    """What stays loaded in a worker.

    Attributes:
        embeddings: prompt embedding of every class, [K, T, D].
    """

    generator: Generator
    annotator: Annotator
    embeddings: Tensor


def load_models(root: Root, plan: BuildPlan, *, device: str) -> Models:
    """Load generator, CLIP and prototypes; encode every class name once.

    Raises:
        InputError: a model cannot be loaded or does not suit; two prompts encode alike.
    """
    device = resolve_device(device)
    vectors, facts = read_prototypes(root)
    encoder = ClipEncoder(plan.config.annotation, device=device)
    generator = load_generator(plan.config.generator, device=device)
    texts = prompts(plan.config.generator.prompt, plan.class_names)
    embeddings = generator.encode(texts)
    _refuse_equal(embeddings, texts)
    return Models(generator, Annotator(encoder, vectors, scale=float(facts["scale"])), embeddings)


def _refuse_equal(embeddings: Tensor, texts: list[str]) -> None:
    flat = embeddings.flatten(1)
    for index in range(1, len(flat)):
        same = (flat[:index] == flat[index]).all(dim=1).nonzero()
        if len(same):
            pair = f"{texts[int(same[0])]!r} and {texts[index]!r}"
            raise InputError("generator.prompt", pair, "encode identically; rename a class")


def generate_shard(
    spec: ShardSpec,
    plan: BuildPlan,
    *,
    models: Models,
    root: Root,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Make one shard and commit it; nothing has a final name before all of it exists.

    Args:
        beat: called after each batch, for whoever watches that work goes on.
    Returns:
        The commit record.
    Raises:
        ValueError: an image came out flat; nothing is published.
    """
    clock = Stopwatch()
    samples: list[GroupSample] = []
    features: list[Tensor] = []
    size = plan.config.shards.groups_per_batch
    for start in range(spec.start, spec.stop, size):
        groups = [plan.group(i) for i in range(start, min(start + size, spec.stop))]
        made, found = _make_batch(groups, plan, models=models, clock=clock)
        samples += made
        features.append(found)
        beat()
    return _publish(spec, samples, torch.cat(features), root=root, clock=clock)


def _make_batch(
    groups: list[MixGroup], plan: BuildPlan, *, models: Models, clock: Stopwatch
) -> tuple[list[GroupSample], Tensor]:
    """Samples of some groups and their CLIP features [G, A, D]."""
    settings = plan.config.shards
    with clock.stage("generate"):
        images = mix_groups(
            groups,
            alphas=plan.alphas,
            embeddings=models.embeddings,
            generator=models.generator,
            batch_groups=settings.groups_per_batch,
        )
        _refuse_flat(images, groups)
        resize = resizer(settings.store_size)
        stored = np.stack([[resize(image) for image in series] for series in images])
    with clock.stage("annotate"):
        features, weights, labels = _annotate(stored, groups, plan, annotator=models.annotator)
    with clock.stage("encode"):
        samples = [
            GroupSample(
                _group_record(group, plan, weights[row], labels[row]),
                [encode_image(image, settings.image_format) for image in stored[row]],
                settings.image_format,
            )
            for row, group in enumerate(groups)
        ]
    return samples, features


def _annotate(
    images: np.ndarray, groups: list[MixGroup], plan: BuildPlan, *, annotator: Annotator
) -> tuple[Tensor, Tensor, Tensor]:
    """Features [G, A, D], raw weights [G, A] and labels [G, A, K] of images [G, A, H, W, 3]."""
    count, alphas = images.shape[:2]
    first = torch.tensor([group.first for group in groups]).repeat_interleave(alphas)
    second = torch.tensor([group.second for group in groups]).repeat_interleave(alphas)
    features = annotator.features(images.reshape(-1, *images.shape[2:]))
    weights = annotator.weights(features, first, second)
    probabilities = annotator.probabilities(weights)
    labels = soft_labels(probabilities, first, second, len(plan.class_names))
    return (
        features.view(count, alphas, -1),
        weights.view(count, alphas),
        labels.view(count, alphas, -1),
    )


def _group_record(
    group: MixGroup, plan: BuildPlan, weights: Tensor, labels: Tensor
) -> dict[str, Any]:
    pair = (group.first, group.second)
    return {
        "group": group.index,
        "classes": list(pair),
        "names": [plan.class_names[k] for k in pair],
        "seed": group.seed,
        "alphas": list(plan.alphas),
        "weights": weights.tolist(),
        "labels": [[[k, float(row[k])] for k in pair] for row in labels],
        "noise": {"strategy": "random", "stability": None},
    }


def _refuse_flat(images: np.ndarray, groups: list[MixGroup]) -> None:
    pixels = images.reshape(*images.shape[:2], -1)
    flat = np.argwhere(pixels.min(axis=2) == pixels.max(axis=2))
    if len(flat):
        row, position = flat[0]
        value = images[row, position].flat[0]
        raise ValueError(
            f"group {groups[row].index}: image {position} is one flat colour ({value})"
        )


def _publish(
    spec: ShardSpec, samples: list[GroupSample], features: Tensor, *, root: Root, clock: Stopwatch
) -> dict[str, Any]:
    stem = shard_name(spec.index)
    with clock.stage("write"), root.store.staging(f"{stem}.tar") as partial:
        with partial.open("wb") as file:
            write_tar(file, samples)
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name, size = f"{stem}-{digest[:8]}.tar", partial.stat().st_size
        root.store.publish(partial, name)
        content = save({"features": features.half()})
        root.store.put(f"{stem}.features.safetensors", content)
    record = {
        "spec": spec.digest,
        "shard": spec.index,
        "tar": name,
        "sha256": digest,
        "bytes": size,
        "features": {
            "name": f"{stem}.features.safetensors",
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
        },
        "groups": len(samples),
        "first": spec.start,
        "seconds": dict(clock.seconds),
        "attempt": 1 + len(root.failures().get(spec.index, [])),
        "worker": f"{socket.gethostname()}:{os.getpid()}",
        "versions": library_versions(),
    }
    root.commit(record)
    return record
