"""Compare the stored CLIP features of images with texts, to flag series that show a concept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from semix.data.errors import InputError
from semix.data.files import read_bytes
from semix.data.pinned import PinnedRoot
from semix.pipeline.config import AnnotationConfig, BuildConfig
from semix.pipeline.plan import build_of
from semix.pipeline.prompts import prompts
from semix.pipeline.provenance import (
    encoder_content,
    encoder_identity,
    labelling_encoders,
    unchanged,
)
from semix.pipeline.relabel import annotation_of

MAX_CONCEPTS = 1000
MAX_BYTES = 2**20  # of a file of concepts
WORST = 20  # images listed per concept


class ConceptImage(TypedDict):
    """One flagged image: series, position in it, and by how much its cosine exceeds the limit."""

    group: int
    position: int
    excess: float


class ConceptMetrics(TypedDict):
    """What was found of one concept; `worst` has the images that exceed the limit most."""

    text: str
    series: int
    images: int
    worst: list[ConceptImage]


class ConceptFindings(TypedDict):
    """The section `concepts` of audit.json.

    Attributes:
        above: the cosine that flags an image; None where that is the one to its own classes.
        model: the CLIP model of the features.
        class_texts: what each class of the data was encoded as.
    """

    above: float | None
    model: str
    class_texts: list[str]
    concepts: list[ConceptMetrics]


@dataclass(frozen=True)
class Concepts:
    """Encoded concepts and classes, of unit length.

    Attributes:
        features: float32 [C, D] of the concepts; class_features: float32 [K, D].
        above: flags an image whose cosine to a concept is larger. None flags an image that is
            nearer to a concept than to the text of each class that its series mixes.
    """

    texts: tuple[str, ...]
    class_texts: tuple[str, ...]
    features: Tensor
    class_features: Tensor
    above: float | None
    model: str

    def excess(self, features: Tensor, classes: Sequence[int]) -> np.ndarray:
        """By how much the cosine of each image to each concept exceeds the limit.

        Args:
            features: [A, D] of the images of one series, as stored.
            classes: the classes that it mixes.
        Returns:
            float32 [A, C], positive where an image is flagged; NaN for features that are no
            numbers, which are never flagged.
        """
        unit = torch.nn.functional.normalize(features.float(), dim=-1)
        cosine = unit @ self.features.T  # [A, C]
        if self.above is not None:
            return (cosine - self.above).numpy()
        own = (unit @ self.class_features[list(classes)].T).amax(-1, keepdim=True)  # [A, 1]
        return (cosine - own).numpy()

    def findings(self, groups: np.ndarray, excess: np.ndarray) -> ConceptFindings:
        """Count flagged series and images.

        Args:
            groups: int64 [G]; excess: float32 [G, A, C].
        """
        concepts = []
        for column, text in enumerate(self.texts):
            values = np.nan_to_num(excess[..., column], nan=-np.inf)  # [G, A]
            order = np.argsort(-values, axis=None, kind="stable")[:WORST]
            worst: list[ConceptImage] = [
                {
                    "group": int(groups[row]),
                    "position": int(position),
                    "excess": round(float(values[row, position]), 6),
                }
                for row, position in zip(*np.unravel_index(order, values.shape), strict=True)
                if values[row, position] > 0
            ]
            flagged = values > 0
            found: ConceptMetrics = {
                "text": text,
                "series": int(flagged.any(1).sum()),
                "images": int(flagged.sum()),
                "worst": worst,
            }
            concepts.append(found)
        return {
            "above": self.above,
            "model": self.model,
            "class_texts": list(self.class_texts),
            "concepts": concepts,
        }


def read_concepts(file: Path) -> list[str]:
    """The lines of a text file, without empty lines and those that begin with `#`.

    Raises:
        InputError: no such file, too large, not UTF-8, or no concept in it.
    """
    try:
        text = read_bytes(file, max_bytes=MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise InputError(
            "concepts", file, "is not UTF-8 text; write one concept per line"
        ) from None
    except OSError as error:
        raise InputError("concepts", file, f"cannot be read: {error.strerror or error}") from None
    lines = [line.strip() for line in text.splitlines()]
    concepts = [line for line in lines if line and not line.startswith("#")]
    if not concepts:
        raise InputError("concepts", file, "holds no concept; write one per line")
    return concepts


def check_concepts(texts: Sequence[str], above: float | None) -> None:
    """Raises InputError for a concept that is empty, too many of them, or a limit out of range."""
    if above is not None and not texts:
        raise InputError(
            "concept_above", above, "is a limit for concepts; name some, or leave it out"
        )
    if above is not None and not -1 <= above <= 1:
        raise InputError("concept_above", above, "is a cosine; give -1 to 1")
    if any(not text.strip() for text in texts):
        raise InputError("concept", "nothing", "name what an image may show")
    if len(texts) > MAX_CONCEPTS:
        raise InputError("concept", f"{len(texts):,} texts", f"give at most {MAX_CONCEPTS:,}")


def encode_concepts(
    source: PinnedRoot,
    texts: Sequence[str],
    *,
    above: float | None = None,
    device: str = "cpu",
    overrides: Sequence[str] = (),
) -> Concepts:
    """Encode concepts, and the names of the classes in the root's own (first) prompt.

    Args:
        overrides: settings that differ on this machine, as where the CLIP model lies.
    Raises:
        InputError: the CLIP model is not here, has other files than the one that encoded the
            images, or no text tower; a text that is too long for it.
    """
    from semix.pipeline.clip import encode_texts

    config = build_of(source.root, overrides).config
    annotation = _annotation(source, config)
    template = config.generator.prompt
    names = [config.generator.names.get(name, name) for name in source.class_names]
    class_texts = prompts(template if isinstance(template, str) else template[0], names)
    unique = tuple(dict.fromkeys(texts))
    features = encode_texts(annotation.first, [*unique, *class_texts], device=device)
    return Concepts(
        unique,
        tuple(class_texts),
        features[: len(unique)],
        features[len(unique) :],
        above,
        annotation.model,
    )


def _annotation(source: PinnedRoot, config: BuildConfig) -> AnnotationConfig:
    """The annotation whose model encoded the images; refuses one with other files here."""
    labels = source.label_set
    annotation = config.annotation if labels is None else annotation_of(labels)
    stored = (
        source.root.plan.models["annotation"]
        if labels is None
        else labelling_encoders(labels.record)
    )
    here = encoder_identity(annotation.first, annotation.dtype)
    if not unchanged(encoder_content(stored), encoder_content(here)):
        remedy = "is not here with the files that encoded the images; name its place by "
        raise InputError("annotation.model", annotation.model, f"{remedy}--set annotation.model=")
    return annotation
