"""prototypes.safetensors: what one or two encoders measured, with facts for a reader."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from data.errors import InputError
from pipeline.annotation.encoders import FEATURES, SECOND
from pipeline.annotation.measurement import NAMES, Measurement, Names, implied_label
from pipeline.annotation.sealed import Facts, open_sealed, seal
from pipeline.annotation.statistics import coinciding
from pipeline.config import AnnotationConfig

log = logging.getLogger("semix.build")

# Names of the tensors, and what the names of the facts begin with.
PLACES: dict[str, tuple[Names, str]] = {
    FEATURES: (NAMES, ""),
    SECOND: (("second", "second_unit"), "second_"),
}


USUAL = (0.6, 0.99)  # labels of an average real image: less says little, more is nearly certain


@dataclass(frozen=True)
class Seen:
    """What one encoder measured, and its identity."""

    identity: Mapping[str, Any]
    measurement: Measurement


@dataclass(frozen=True)
class PrototypeFile:
    """What labels need of the real data.

    Attributes:
        parts: by the name of the features, `features` and perhaps `second`.
        real: digest of the images that were measured.
    """

    parts: Mapping[str, Seen]
    class_names: tuple[str, ...]
    real: str

    def pack(self, config: AnnotationConfig) -> bytes:
        """The file of one annotation; its scale is among the facts."""
        tensors: dict[str, Tensor] = {}
        facts = {"real": self.real, "class_names": json.dumps(self.class_names)}
        for name, seen in self.parts.items():
            names, prefix = PLACES[name]
            tensors |= seen.measurement.tensors(names)
            facts |= seen.measurement.facts(prefix) | _facts(seen, config, prefix)
        return seal(tensors, facts)

    @classmethod
    def unpack(cls, content: bytes) -> Self:
        """Raises ValueError: another file, or a damaged one."""
        tensors, facts = open_sealed(content)
        parts = {}
        for name, (names, prefix) in PLACES.items():
            if f"{prefix}encoder" in facts:
                measurement = Measurement.of(tensors, facts, names=names, prefix=prefix)
                parts[name] = Seen(json.loads(facts[f"{prefix}encoder"]), measurement)
        return cls(parts, tuple(json.loads(facts["class_names"])), facts["real"])


def refuse_coinciding(file: PrototypeFile, config: AnnotationConfig) -> None:
    """Raises InputError for two classes between whose prototypes no line lies."""
    for seen in file.parts.values():
        pair = coinciding(seen.measurement.chosen(normalize=config.normalize))
        if pair is not None:
            first, second = (repr(file.class_names[k]) for k in pair)
            remedy = f"have one CLIP prototype under {seen.identity['model']}, so that no image "
            remedy += "lies between them; give each images of its own, or leave one out"
            raise InputError("real", f"classes {first} and {second}", remedy)


def say_scale(file: PrototypeFile, config: AnnotationConfig) -> None:
    """Log the dial that `scale` is, by the label that it gives to an average real image, where
    it was measured or is far from usual; the facts have it always."""
    if config.rule != "projection":
        return
    for name, seen in file.parts.items():
        scale = seen.measurement.scale(config.scale, normalize=config.normalize)
        if config.scale != "auto" and USUAL[0] <= implied_label(scale) <= USUAL[1]:
            continue
        log.info(
            "sharpening of %s: scale %.3g (%s); an average real image would be labelled %.3f",
            name,
            scale,
            "from the spread of real images" if config.scale == "auto" else "as set",
            implied_label(scale),
        )


def _facts(seen: Seen, config: AnnotationConfig, prefix: str) -> Facts:
    scale = seen.measurement.scale(config.scale, normalize=config.normalize)
    return {
        f"{prefix}encoder": json.dumps(seen.identity, sort_keys=True),
        f"{prefix}scale": repr(scale),
        f"{prefix}label_of_average_real_image": repr(implied_label(scale)),
    }
