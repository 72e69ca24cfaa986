"""The real images as an annotation's encoders see them: known, cached, or measured now."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from data.device import resolve_device
from data.errors import InputError
from data.fingerprint import fingerprint
from data.real import RealDataConfig, RealDataset, load_real
from data.store import Store
from pipeline.annotation.cache import cached, keep
from pipeline.annotation.chunks import FeatureChunks
from pipeline.annotation.encoders import NAMES, SECOND
from pipeline.annotation.measurement import Measurement, measured
from pipeline.annotation.progress import Progress
from pipeline.annotation.prototype_file import PrototypeFile, Seen
from pipeline.config import AnnotationConfig, EncoderConfig
from pipeline.provenance import encoder_content

BATCH = 256  # images encoded at once
CHUNK = 16 * BATCH  # images whose features are one file; a kill loses that many at most
LIBRARIES = ("torch", "open_clip_torch")  # others may give other last bits

log = logging.getLogger("semix.build")


@dataclass
class Survey:
    """One training split, seen by any encoder.

    Attributes:
        known: measured before of the same images; its encoders need no images.
        store: where features wait, chunk by chunk, until all are there.
    """

    real: RealDataConfig
    device: str
    store: Store
    known: PrototypeFile | None = None
    beat: Callable[[], None] = lambda: None

    def file(self, config: AnnotationConfig, identity: Mapping[str, Any]) -> PrototypeFile:
        """What all encoders of an annotation measure.

        Args:
            identity: `pipeline.provenance.annotation_identity(config)`.
        """
        identities = (identity, identity.get(SECOND, {}))
        parts = {
            name: self.seen_by(encoder, told, field)
            for name, told, (field, encoder) in zip(
                NAMES, identities, config.encoders, strict=False
            )
        }
        return PrototypeFile(parts, self.class_names, self.real_digest)

    def seen_by(self, config: EncoderConfig, identity: Mapping[str, Any], field: str) -> Seen:
        """What one encoder measures; `field` names its settings in error messages."""
        content = encoder_content(identity)
        for seen in self.known.parts.values() if self.known else ():
            if encoder_content(seen.identity) == content:
                return Seen(identity, seen.measurement)
        digest = self._digest(content)
        found = cached(digest)
        if found is None:
            found = self._measure(config, digest, field, dtype=identity["dtype"])
            keep(digest, found)
        return Seen(identity, found)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.known.class_names if self.known else self.data.class_names

    @property
    def real_digest(self) -> str:
        return self.known.real if self.known else self.data.train.digest

    @cached_property
    def data(self) -> RealDataset:
        found = load_real(self.real)
        if self.known and self.known.real != found.train.digest:
            remedy = "its images changed since prototypes were measured; restore them"
            raise InputError("real", self.real.path or self.real.name, remedy)
        return found

    def _digest(self, content: Mapping[str, Any]) -> str:
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
        train, names = self.data.train, self.data.class_names
        counts = np.bincount(train.targets, minlength=len(names))
        if not counts.all():
            remedy = "has no training images; add some, or leave the class out"
            raise InputError("real", f"class {names[int(counts.argmin())]!r}", remedy)
        log.info("prototypes: %d training images pass through %s", len(train), config.model)
        device = resolve_device(self.device)
        from pipeline.clip import ClipEncoder  # open_clip costs seconds

        encoder = ClipEncoder(config, device=device, dtype=dtype, field=field)
        chunks = FeatureChunks(
            train,
            lambda images: encoder.encode(images).cpu(),
            self.store,
            f"prototypes/{digest}",
            size=CHUNK,
            batch=BATCH,
            beat=Progress(len(train), self.beat),
        )
        return measured(chunks, len(names))
