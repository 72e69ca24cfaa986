"""The real images as an annotation's encoders see them: known, cached, or measured now.

Their features wait in the store chunk by chunk, so that a killed measurement goes on; what was
measured is cached on this machine, by content, so that another root need not measure again.
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
from semix.data.device import resolve_device
from semix.data.errors import InputError
from semix.data.files import read_bytes, write_atomically
from semix.data.fingerprint import fingerprint
from semix.data.machine import cache_folder, cores
from semix.data.real import load_real
from semix.data.splits import ImageSplit, RealDataConfig, RealDataset
from semix.data.store import MOST, Store
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
from torch import Tensor

BATCH = 256  # images encoded at once
CHUNK = 16 * BATCH  # images whose features are one file; a kill loses that many at most
MOST_THREADS = 16  # that decode
LIBRARIES = ("torch", "open_clip_torch")  # others may give other last bits
SAY_EVERY_S = 30.0

log = logging.getLogger("semix.build")


@dataclass
class PrototypeMeasurement:
    """One training split, seen by any encoder: known, cached, or measured now.

    Attributes:
        known: measured before of the same images; its encoders need no images.
        store: where features wait, chunk by chunk, until all are there; below `folder`.
    """

    real: RealDataConfig
    device: str
    store: Store
    folder: str
    known: PrototypeFile | None = None
    heartbeat: Callable[[], None] = lambda: None

    def file(self, config: AnnotationConfig, identity: AnnotationIdentity) -> PrototypeFile:
        """What all encoders of an annotation measure.

        Args:
            identity: `semix.pipeline.provenance.annotation_identity(config)`.
        """
        identities = [identity, *([identity["second"]] if "second" in identity else [])]
        parts = {
            name: self.seen_by(encoder, told, field)
            for name, told, (field, encoder) in zip(
                TENSOR_NAMES, identities, config.encoders, strict=False
            )
        }
        if self.known:
            return PrototypeFile(parts, self.known.class_names, self.known.real)
        return PrototypeFile(parts, self.data.class_names, self.data.train.digest)

    def seen_by(
        self, config: EncoderConfig, identity: EncoderIdentity, field: str
    ) -> EncoderMeasurement:
        """What one encoder measures; `field` names its settings in error messages."""
        content = encoder_content(identity)
        for seen in self.known.parts.values() if self.known else ():
            if encoder_content(seen.identity) == content:
                return EncoderMeasurement(identity, seen.measurement)
        digest = self._digest(content)
        found = _cached(digest)
        if found is None:
            found = self._measure(config, digest, field, dtype=identity["dtype"])
            _keep(digest, found)
        return EncoderMeasurement(identity, found)

    @cached_property
    def data(self) -> RealDataset:
        found = load_real(self.real)
        if self.known and self.known.real != found.train.digest:
            remedy = "its images changed since prototypes were measured; restore them"
            raise InputError("real", self.real.path or self.real.name, remedy)
        return found

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
        chunks = FeatureChunks(
            train,
            lambda images: encoder.encode(images).cpu(),
            self.store,
            f"{self.folder}{digest}",
            size=CHUNK,
            batch=BATCH,
            heartbeat=EncodingProgress(len(train), self.heartbeat),
        )
        return measure_features(chunks, len(names))


@dataclass(frozen=True)
class FeatureChunks:
    """The features of all images of a split, of which one chunk at a time is in memory.

    Attributes:
        encode: uint8 [N, H, W, 3] -> float32 [N, D] on the CPU.
        folder: in the store, for features of this encoder, split and layout alone.
        size: images a file; batch: images encoded at once.
        beat: called after each batch, with how far in the split it reaches.
    """

    split: ImageSplit
    encode: Callable[[Tensor], Tensor]
    store: Store
    folder: str
    size: int
    batch: int
    heartbeat: Callable[[int], None] = field(default=lambda position: None)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Features float32 [n, D] and targets int64 [n], in the order of the split."""
        for start in range(0, len(self.split), self.size):
            stop = min(start + self.size, len(self.split))
            yield self._features(start, stop), torch.from_numpy(self.split.targets[start:stop])

    def _features(self, start: int, stop: int) -> Tensor:
        name = f"{self.folder}/{start // self.size:07d}.safetensors"
        facts = {"images": f"{start} to {stop - 1}"}
        found = self._stored(name, facts)
        if found is None:
            found = self._encoded(start, stop)
            self.store.create(name, seal({"features": found}, facts))
        return found

    def _stored(self, name: str, facts: Mapping[str, str]) -> Tensor | None:
        try:
            tensors, there = open_sealed(self.store.get(name))
            if there == facts:
                return torch.from_numpy(tensors["features"])
        except FileNotFoundError:
            return None
        except ValueError:
            pass  # damaged, but the images are still there
        with suppress(FileNotFoundError):  # another process saw it too
            self.store.delete(name)
        return None

    def _encoded(self, start: int, stop: int) -> Tensor:
        parts, position = [], start
        for images in decoded(self.split, start, stop, batch=self.batch):
            parts.append(self.encode(images))
            position += len(images)
            self.heartbeat(position)
        features = torch.cat(parts)
        bad = ~torch.isfinite(features).all(1)
        if bad.any():
            image = start + int(bad.nonzero()[0])
            target = int(self.split.targets[image])
            raise FloatingPointError(
                f"training image {image}, of class {target}: its CLIP features are not finite"
            )
        return features


def decoded(split: ImageSplit, start: int, stop: int, *, batch: int) -> Iterator[Tensor]:
    """Images `start` to `stop - 1` in order, uint8 [n, S, S, 3], decoded on threads ahead."""
    threads = min(MOST_THREADS, cores())
    firsts = range(start, stop, batch)
    batches = (np.arange(first, min(first + batch, stop)) for first in firsts)
    parts = (
        (last, part)
        for indices in batches
        for pieces in [np.array_split(indices, min(threads, len(indices)))]
        for last, part in ((piece is pieces[-1], piece) for piece in pieces)
    )
    waiting: list[np.ndarray] = []
    load = mapped(lambda item: (item[0], split.images(item[1])), parts, threads=threads)
    for last, images in load:
        waiting.append(images)
        if last:
            yield torch.from_numpy(np.concatenate(waiting))
            waiting = []


class EncodingProgress:
    """Says now and then how far a pass over the real images is; `heartbeat` hears of each batch."""

    def __init__(self, total: int, heartbeat: Callable[[], None]) -> None:
        self.total = total
        self.heartbeat = heartbeat
        self.started = self.said = time.monotonic()
        self.first: int | None = None

    def __call__(self, position: int) -> None:
        """At this position of the split."""
        self.heartbeat()
        now = time.monotonic()
        if self.first is None:  # a pass that goes on after a kill starts in the middle
            self.first, self.started = position, now
        if now - self.said < SAY_EVERY_S:
            return
        self.said = now
        rate = (position - self.first) / max(now - self.started, 1e-9)
        log.info("prototypes: %d of %d images, %.0f a second", position, self.total, rate)


def _cached(digest: str) -> Measurement | None:
    """What this machine measured before under this digest; a damaged file counts as none."""
    path = _cache(digest)
    try:
        tensors, facts = open_sealed(read_bytes(path, most=MOST))
        if facts.get("digest") != digest:
            raise ValueError("belongs to another measurement")
        return Measurement.of(tensors, facts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not used, and measured again: %s", path, error)
        return None


def _keep(digest: str, measurement: Measurement) -> None:
    """Put it into the cache folder; one that cannot be written is only worth a warning."""
    tensors, facts = measurement.parts()
    try:
        write_atomically(_cache(digest), seal(tensors, facts | {"digest": digest}))
    except OSError as error:
        log.warning("prototypes are not cached: %s", error)


def _cache(digest: str) -> Path:
    return cache_folder() / f"prototypes-{digest}.safetensors"


def similar_pairs(
    prototypes: Tensor, count: int, *, temperature: float, seed: int
) -> list[tuple[int, int]]:
    """Draw `count` different pairs with odds exp(cosine / temperature), in ascending order.

    Adding Gumbel noise to the log-odds and keeping the largest draws without replacement
    (Efraimidis and Spirakis 2006). Memory is that of one row of pairs and of the result.

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
