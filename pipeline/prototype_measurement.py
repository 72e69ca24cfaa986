"""Measure class prototypes of the real images, or take them from another file or the cache.

Features are stored chunk by chunk until the measurement is complete, so that a killed one can
continue. Measurements are cached on this machine by content, for other roots.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from semix.data.device import resolve_device
from semix.data.errors import InputError
from semix.data.files import read_bytes, write_atomically
from semix.data.fingerprint import fingerprint
from semix.data.machine import cache_folder, cores
from semix.data.pace import Throttle
from semix.data.real import load_real
from semix.data.splits import ImageSplit, RealDataConfig, RealDataset
from semix.data.store import MAX_BYTES, Store
from semix.data.tensors import open_sealed, seal
from semix.data.threads import mapped
from semix.pipeline.config import AnnotationConfig, EncoderConfig
from semix.pipeline.prototype_statistics import (
    TENSOR_NAMES,
    EncoderMeasurement,
    Measurement,
    PrototypeFile,
    measure_features,
)
from semix.pipeline.provenance import AnnotationIdentity, EncoderIdentity, encoder_content

BATCH = 256  # images encoded at once
CHUNK = 16 * BATCH  # images per file of features; a kill loses at most this many
MAX_THREADS = 16  # for decoding
LIBRARIES = ("torch", "open_clip_torch")  # another version may give other last bits
LOG_INTERVAL_S = 30.0

log = logging.getLogger("semix.build")


@dataclass
class PrototypeMeasurement:
    """Measures one training split with any encoder, unless it is known or cached.

    Attributes:
        known: earlier measurements of the same images, which are reused for equal encoders.
        store: holds chunks of features below `folder` until all are measured.
    """

    real: RealDataConfig
    device: str
    store: Store
    folder: str
    known: PrototypeFile | None = None
    heartbeat: Callable[[], None] = lambda: None

    def file(self, config: AnnotationConfig, identity: AnnotationIdentity) -> PrototypeFile:
        """Measure with all encoders of an annotation.

        Args:
            identity: `semix.pipeline.provenance.annotation_identity(config)`.
        """
        identities = [identity, *([identity["second"]] if "second" in identity else [])]
        measurements = {
            name: self.measure_with(encoder, encoder_identity, field)
            for name, encoder_identity, (field, encoder) in zip(
                TENSOR_NAMES, identities, config.encoders, strict=False
            )
        }
        if self.known:
            return PrototypeFile(measurements, self.known.class_names, self.known.real)
        return PrototypeFile(measurements, self.data.class_names, self.data.train.digest)

    def measure_with(
        self, config: EncoderConfig, identity: EncoderIdentity, field: str
    ) -> EncoderMeasurement:
        """Measure with one encoder; `field` names its settings in error messages."""
        content = encoder_content(identity)
        for known_measurement in self.known.parts.values() if self.known else ():
            if encoder_content(known_measurement.identity) == content:
                return EncoderMeasurement(identity, known_measurement.measurement)
        digest = self._digest(content)
        measurement = _read_cache(digest)
        if measurement is None:
            measurement = self._measure(config, digest, field, dtype=identity["dtype"])
            _write_cache(digest, measurement)
        return EncoderMeasurement(identity, measurement)

    @cached_property
    def data(self) -> RealDataset:
        data = load_real(self.real, heartbeat=self.heartbeat)
        data.train.compute_digest(self.heartbeat)
        if self.known and self.known.real != data.train.digest:
            remedy = "its images changed since prototypes were measured; restore them"
            raise InputError("real", self.real.path or self.real.name, remedy)
        return data

    def _digest(self, content: Mapping[str, object]) -> str:
        return fingerprint(
            {
                "encoder": dict(content),
                "real": self.data.train.digest,
                "classes": len(self.data.class_names),
                "layout": [BATCH, CHUNK],
                "device": torch.device(resolve_device(self.device)).type,
                "libraries": {name: version(name) for name in LIBRARIES},
            }
        )

    def _measure(
        self, config: EncoderConfig, digest: str, field: str, *, dtype: str
    ) -> Measurement:
        from semix.pipeline.clip import ClipEncoder

        train, names = self.data.train, self.data.class_names
        counts = np.bincount(train.targets, minlength=len(names))
        if not counts.all():
            remedy = "has no training images; add some, or leave the class out"
            raise InputError("real", f"class {names[int(counts.argmin())]!r}", remedy)
        log.info("prototypes: %d training images pass through %s", len(train), config.model)
        device = resolve_device(self.device)
        encoder = ClipEncoder(config, device=device, dtype=dtype, field=field)
        feature_chunks = FeatureChunks(
            train,
            lambda images: encoder.encode(images).cpu(),
            self.store,
            f"{self.folder}{digest}",
            size=CHUNK,
            batch=BATCH,
            heartbeat=EncodingProgress(len(train), self.heartbeat),
        )
        return measure_features(feature_chunks, len(names))


@dataclass(frozen=True)
class FeatureChunks:
    """The features of all images of a split, with one chunk at a time in memory.

    Attributes:
        encode: uint8 [N, H, W, 3] -> float32 [N, D] on the CPU.
        folder: in the store, for features of this encoder, split and layout only.
        size: images per file; batch: images encoded at once.
        heartbeat: called after each batch, with the number of images up to its end.
    """

    split: ImageSplit
    encode: Callable[[Tensor], Tensor]
    store: Store
    folder: str
    size: int
    batch: int
    heartbeat: Callable[[int], None] = field(default=lambda position: None)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features float32 [n, D] and targets int64 [n], in the order of the split."""
        for start in range(0, len(self.split), self.size):
            stop = min(start + self.size, len(self.split))
            yield self._features(start, stop), torch.from_numpy(self.split.targets[start:stop])

    def _features(self, start: int, stop: int) -> Tensor:
        name = f"{self.folder}/{start // self.size:07d}.safetensors"
        facts = {"images": f"{start} to {stop - 1}"}
        features = self._read_chunk(name, facts)
        if features is None:
            features = self._encode_chunk(start, stop)
            self.store.create(name, seal({"features": features}, facts))
        return features

    def _read_chunk(self, name: str, facts: Mapping[str, str]) -> Tensor | None:
        try:
            tensors, stored = open_sealed(self.store.get(name))
            if stored == facts:
                return torch.from_numpy(tensors["features"])
        except FileNotFoundError:
            return None
        except ValueError:
            pass  # damaged, but the images are still there
        with suppress(FileNotFoundError):  # another process deleted it
            self.store.delete(name)
        return None

    def _encode_chunk(self, start: int, stop: int) -> Tensor:
        batches, position = [], start
        for images in decoded(self.split, start, stop, batch=self.batch):
            batches.append(self.encode(images))
            position += len(images)
            self.heartbeat(position)
        features = torch.cat(batches)
        is_bad = ~torch.isfinite(features).all(1)
        if is_bad.any():
            image = start + int(is_bad.nonzero()[0])
            target = int(self.split.targets[image])
            raise FloatingPointError(
                f"training image {image}, of class {target}: its CLIP features are not finite"
            )
        return features


def decoded(split: ImageSplit, start: int, stop: int, *, batch: int) -> Iterator[Tensor]:
    """Yield images `start` to `stop - 1` in order, uint8 [n, S, S, 3], decoded ahead on threads."""
    threads = min(MAX_THREADS, cores())
    starts = range(start, stop, batch)
    batches = (np.arange(first, min(first + batch, stop)) for first in starts)
    tasks = (
        (is_last, piece)
        for indices in batches
        for pieces in [np.array_split(indices, min(threads, len(indices)))]
        for is_last, piece in ((piece is pieces[-1], piece) for piece in pieces)
    )
    batch_images: list[np.ndarray] = []
    load = mapped(lambda task: (task[0], split.images(task[1])), tasks, threads=threads)
    for is_last, images in load:
        batch_images.append(images)
        if is_last:
            yield torch.from_numpy(np.concatenate(batch_images))
            batch_images = []


class EncodingProgress:
    """Logs the progress of a pass over the real images; calls `heartbeat` after each batch."""

    def __init__(self, total: int, heartbeat: Callable[[], None]) -> None:
        self.total = total
        self.heartbeat = heartbeat
        self.started, self.throttle = time.monotonic(), Throttle(LOG_INTERVAL_S)
        self.first_position: int | None = None

    def __call__(self, position: int) -> None:
        """Report that the pass is at this position of the split."""
        self.heartbeat()
        now = time.monotonic()
        if self.first_position is None:  # a pass that continues after a kill starts in the middle
            self.first_position, self.started = position, now
        if not self.throttle.is_due():
            return
        self.throttle.restart()
        rate = (position - self.first_position) / max(now - self.started, 1e-9)
        log.info("prototypes: %d of %d images, %.0f per second", position, self.total, rate)


def _read_cache(digest: str) -> Measurement | None:
    """The cached measurement with this digest; None if there is none or it is damaged."""
    path = _cache_path(digest)
    try:
        tensors, facts = open_sealed(read_bytes(path, max_bytes=MAX_BYTES))
        if facts.get("digest") != digest:
            raise ValueError("belongs to another measurement")
        return Measurement.of(tensors, facts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not used, and measured again: %s", path, error)
        return None


def _write_cache(digest: str, measurement: Measurement) -> None:
    """Write a measurement to the cache folder; only warn if it cannot be written."""
    tensors, facts = measurement.parts()
    try:
        write_atomically(_cache_path(digest), seal(tensors, facts | {"digest": digest}))
    except OSError as error:
        log.warning("prototypes are not cached: %s", error)


def _cache_path(digest: str) -> Path:
    return cache_folder() / f"prototypes-{digest}.safetensors"


def similar_pairs(
    prototypes: Tensor, count: int, *, temperature: float, seed: int
) -> list[tuple[int, int]]:
    """Draw `count` different pairs with odds exp(cosine / temperature), sorted by classes.

    Keeping the largest sums of log-odds and Gumbel noise draws without replacement (Efraimidis and
    Spirakis 2006). Memory holds one row of pairs and the result.

    Args:
        prototypes: [K, D]; count: at most K (K - 1) / 2.
    """
    unit = torch.nn.functional.normalize(prototypes.double(), dim=1)
    rng = torch.Generator().manual_seed(seed)
    keys, pairs = torch.empty(0, dtype=torch.float64), torch.empty(0, 2, dtype=torch.int64)
    for first in range(len(unit) - 1):
        cosine = unit[first + 1 :] @ unit[first]
        uniform = torch.rand(len(cosine), generator=rng, dtype=torch.float64)
        gumbel = -(-uniform.clamp(min=1e-300).log()).log()
        second = torch.arange(first + 1, len(unit))
        keys = torch.cat([keys, cosine / temperature + gumbel])
        pairs = torch.cat([pairs, torch.stack([torch.full_like(second, first), second], 1)])
        if len(keys) > count:
            keys, best = keys.topk(count)
            pairs = pairs[best]
    return sorted((first, second) for first, second in pairs.tolist())
