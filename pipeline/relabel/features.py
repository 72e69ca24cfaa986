"""Features of a shard's images: stored ones, or encoded anew from the images in its tar."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from data.images import decode_image
from data.shards import GroupSample
from data.store import Store
from data.tensors import read_tensors
from pipeline.annotate import Annotator
from pipeline.plan import MixGroup
from pipeline.relabel.verified import verified_series

Features = dict[str, Tensor]  # by encoder, each float32 [G, A, D]
Record = Mapping[str, Any]


def read_stored(store: Store, file: Record, groups: Sequence[MixGroup]) -> Features:
    """The features that a shard's record names.

    Raises:
        ValueError: the file is not there, not as recorded, or of other series.
    """
    name = file["name"]
    try:
        content = store.get(name)
    except FileNotFoundError:
        raise ValueError(f"{name}: the shard's features are not there") from None
    if hashlib.sha256(content).hexdigest() != file["sha256"]:
        raise ValueError(f"{name}: does not have the recorded SHA-256")
    found, _ = read_tensors(content, where=name)
    wanted = (len(groups), len(groups[0].mixture))
    for key, tensor in found.items():
        if tensor.ndim != 3 or tensor.shape[:2] != wanted:
            raise ValueError(f"{name}: {key} is of shape {list(tensor.shape)}, not {[*wanted]}, D")
    return {key: tensor.float() for key, tensor in found.items()}


def encode_images(
    store: Store,
    record: Record,
    groups: Sequence[MixGroup],
    *,
    annotator: Annotator,
    batch: int,
    beat: Callable[[], None] = lambda: None,
) -> Features:
    """Encode the images of a shard in batches of one size; one batch of pixels is in memory.

    Args:
        record: commit record of the shard.
        batch: images in one forward pass; the last one is padded, because its size would move
            the last bits.
    Raises:
        ValueError: the tar is damaged, not the recorded one, or holds other series.
    """
    parts: dict[str, list[Tensor]] = {}
    for pixels in _batches(store, record, groups, batch):
        padded = np.concatenate([pixels, np.repeat(pixels[-1:], batch - len(pixels), axis=0)])
        for key, rows in annotator.encode(torch.from_numpy(padded)).items():
            parts.setdefault(key, []).append(rows[: len(pixels)])
        beat()
    shape = (len(groups), len(groups[0].mixture))
    return {key: torch.cat(rows).unflatten(0, shape) for key, rows in parts.items()}


def store_features(store: Store, features: Features, *, stem: str) -> dict[str, Any]:
    """Keep features as fp16 under a name that carries their hash.

    Returns:
        Name, sha256 and bytes.
    """
    content = save({key: tensor.half().contiguous() for key, tensor in features.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"{stem}-{digest[:8]}.features.safetensors"
    store.create(name, content)  # what is there by this name has the same content
    return {"name": name, "sha256": digest, "bytes": len(content)}


def _batches(
    store: Store, record: Record, groups: Sequence[MixGroup], size: int
) -> Iterator[np.ndarray]:
    waiting: list[np.ndarray] = []
    for sample in verified_series(store, record, groups):
        waiting += _decoded(sample, record)
        while len(waiting) >= size:
            yield _stacked(waiting[:size], record)
            waiting = waiting[size:]
    if waiting:
        yield _stacked(waiting, record)


def _decoded(sample: GroupSample, record: Record) -> list[np.ndarray]:
    try:
        return [decode_image(image) for image in sample.images]
    except ValueError as error:
        where = f"{record['tar']}: group {sample.record['group']}"
        raise ValueError(f"{where}: {error}") from None


def _stacked(images: list[np.ndarray], record: Record) -> np.ndarray:
    if len({image.shape for image in images}) > 1:
        raise ValueError(f"{record['tar']}: its images differ in size")
    return np.stack(images)
