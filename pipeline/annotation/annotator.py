"""The annotator: CLIP features of series in, the label parts of their records out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.annotation.encoders import FEATURES, SECOND, Encoders
from pipeline.annotation.prototype_file import PrototypeFile
from pipeline.annotation.rules import total_variation
from pipeline.annotation.space import Space
from pipeline.config import AnnotationConfig


@dataclass(frozen=True)
class Annotator:
    """Labels the images of series.

    Attributes:
        spaces: by the name of their features, `features` and perhaps `second`.
    """

    config: AnnotationConfig
    spaces: Mapping[str, Space]
    encoders: Encoders

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        """uint8 [N, H, W, 3] -> float32 [N, D] on the CPU for each encoder, `features` first."""
        return self.encoders.encode(images)

    def annotate(
        self,
        features: Mapping[str, Tensor],
        *,
        classes: Sequence[int],
        mixture: Sequence[Sequence[float]],
    ) -> dict[str, Any]:
        """The parts of a series' record that are labels.

        Args:
            features: [A, D] by name, as `encode` gives them or as they are stored.
            classes: the k classes of the series; mixture: their conditioning weights, [A][k].
        Returns:
            `weights` [A], raw weights of the first class; `labels` [A], lists of [class,
            probability], for the rule similarity of all classes of the data, else of the series;
            `coordinates` [A][k], raw, for more than two classes; `agreement` where there is a
            second encoder: its `weights` [A], and the `difference` [A] in [0, 1] of the labels
            that the two give by the same rule, each with its own scale: for two classes that of
            the probabilities of the first, else the total variation distance. The rule
            mixing_ratio takes no labels from CLIP; there the projections are compared.
        Raises:
            FloatingPointError: a feature is not a number.
            ValueError: prototypes coincide, or an image is like none.
        """
        raw, labels = self._label(FEATURES, features, classes)
        record: dict[str, Any] = {
            "weights": raw[:, 0].tolist(),
            "labels": self._sparse(labels, classes, mixture),
        }
        if len(classes) > 2:
            record["coordinates"] = raw.tolist()
        if SECOND in self.spaces:
            other_raw, other = self._label(SECOND, features, classes)
            record["agreement"] = {
                "weights": other_raw[:, 0].tolist(),
                "difference": total_variation(labels, other).tolist(),
            }
        return record

    def _label(
        self, name: str, features: Mapping[str, Tensor], classes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        values = features[name].float()
        finite = torch.isfinite(values).all(1)
        if not finite.all():
            image = int((~finite).nonzero()[0])
            raise FloatingPointError(f"the CLIP {name} of image {image} are not finite")
        return self.spaces[name].label(values, classes)

    def _sparse(
        self, labels: Tensor, classes: Sequence[int], mixture: Sequence[Sequence[float]]
    ) -> list[list[list[float]]]:
        named: Sequence[int] = classes
        rows: Sequence[Sequence[float]] = labels.tolist()
        if self.config.rule == "mixing_ratio":
            rows = mixture
        elif self.config.rule == "similarity":
            named = range(labels.shape[1])
        return [[[k, float(p)] for k, p in zip(named, row, strict=True)] for row in rows]


def build_annotator(config: AnnotationConfig, prototypes: bytes, *, device: str) -> Annotator:
    """An annotator that loads its CLIP models when the first image comes, and not before.

    Args:
        prototypes: what `pipeline.prototypes.measure` gave for this config.
        device: auto, cpu, cuda or cuda:N.
    Raises:
        ValueError: the prototypes are damaged, or of fewer encoders than the config names.
    """
    parts = PrototypeFile.unpack(prototypes).parts
    names = (FEATURES,) if config.second is None else (FEATURES, SECOND)
    for name in names:
        if name not in parts:
            raise ValueError(f"the prototypes hold none of {name}; measure them for this config")
    spaces = {name: Space.of(parts[name].measurement, config) for name in names}
    return Annotator(config, spaces, Encoders(config, device=device))
