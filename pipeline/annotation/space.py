"""One encoder's view of the classes: prototypes, and labels by rule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from data.labels import sharpen
from pipeline.annotation.measurement import Measurement
from pipeline.annotation.rules import projection_weight, similarity_labels
from pipeline.annotation.statistics import unit
from pipeline.config import AnnotationConfig
from pipeline.simplex import coordinates, simplex_projection


@dataclass(frozen=True)
class Space:
    """Labels the features of one encoder.

    Attributes:
        prototypes: float32 [K, D], of length 1 where features are normalised.
        scale: sharpening of `data.labels.sharpen`.
    """

    prototypes: Tensor
    scale: float
    rule: str = "projection"
    temperature: float | None = None
    normalize: bool = False

    @classmethod
    def of(cls, measurement: Measurement, config: AnnotationConfig) -> Self:
        return cls(
            measurement.chosen(normalize=config.normalize),
            measurement.scale(config.scale, normalize=config.normalize),
            config.rule,
            config.temperature,
            config.normalize,
        )

    def label(self, features: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Raw coordinates [A, k] of a series' classes, and its labels by the rule.

        Labels are probabilities [A, k] of those classes; for the rule similarity [A, K], of all.
        The rule mixing_ratio knows none from CLIP: what the projection says stands there.

        Args:
            features: [A, D]; classes: the k classes of the series.
        """
        if self.normalize:
            features = unit(features)
        vertices = self.prototypes[list(classes)]
        raw = _coordinates(features, vertices)
        if self.rule == "similarity":
            return raw, similarity_labels(features, self.prototypes, self.temperature)
        if self.rule == "simplex" or len(classes) > 2:
            return raw, simplex_projection(features, vertices)
        probability = sharpen(raw[:, 0], self.scale)
        return raw, torch.stack([probability, 1 - probability], 1)


def _coordinates(features: Tensor, vertices: Tensor) -> Tensor:
    if len(vertices) > 2:
        return coordinates(features, vertices)
    first, second = (vertex.expand_as(features) for vertex in vertices)
    weight = projection_weight(features, first, second)
    return torch.stack([weight, 1 - weight], 1)
