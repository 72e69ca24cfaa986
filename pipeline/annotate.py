"""CLIP features to soft labels: class prototypes, projection weights, sharpening."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.errors import InputError
from data.labels import sharpen, soft_labels
from data.real import ImageSplit
from pipeline.clip import ClipEncoder
from pipeline.simplex import coordinates, simplex_projection

__all__ = [
    "Annotator",
    "Prototypes",
    "class_prototypes",
    "measure_prototypes",
    "projection_weight",
    "sharpen",
    "soft_labels",
]

SCALE_RANGE = (1.0, 20.0)
COINCIDE = 1e-8  # squared distance below which two prototypes define no line


def class_prototypes(features: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """Mean feature of each class; features are not normalised (CSM, `annotate.py`).

    Args:
        features: [N, D]; targets: int64 [N].
    Returns:
        [K, D].
    Raises:
        ValueError: a class has no features.
    """
    counts = torch.bincount(targets, minlength=num_classes)
    if not counts.all():
        raise ValueError(f"class {int(counts.argmin())} has no features")
    sums = torch.zeros(num_classes, features.shape[1], dtype=features.dtype)
    return sums.index_add_(0, targets, features) / counts[:, None]


def projection_weight(features: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Where each feature lies on the line from the second prototype to the first (CSM).

    Args:
        features, first, second: [N, D], the prototypes of each image's two classes.
    Returns:
        Raw weights [N], not clipped: 1 at `first`, 0 at `second`.
    Raises:
        ValueError: two prototypes coincide, so that no line is defined.
    """
    axis = first - second  # [N, D]
    length_sq = (axis * axis).sum(1)
    if (length_sq < COINCIDE).any():
        raise ValueError("two class prototypes coincide; does each class have images of its own?")
    return ((features - second) * axis).sum(1) / length_sq


@dataclass(frozen=True)
class Prototypes:
    """What annotation needs to know of the real data.

    Attributes:
        vectors: float32 [K, D].
        weight_variance: variance of the weight of real images within their class, averaged over
            all ordered pairs; 1 / variance is the sharpening under which the labels are the
            posterior of two Gaussian classes.
    """

    vectors: Tensor
    weight_variance: float

    def scale(self, configured: float | str) -> float:
        """The sharpening to use: the configured number, or for `auto` the inverse variance."""
        if not isinstance(configured, str):
            return configured
        return min(max(1 / self.weight_variance, SCALE_RANGE[0]), SCALE_RANGE[1])


def measure_prototypes(split: ImageSplit, encoder: ClipEncoder, num_classes: int) -> Prototypes:
    """Prototypes and weight variance of a real split, decoded batch by batch.

    Raises:
        InputError: two classes have the same prototype.
    """
    features = torch.cat(
        [encoder.encode(torch.from_numpy(images)) for images in _batches(split)]
    ).cpu()
    targets = torch.from_numpy(split.targets)
    vectors = class_prototypes(features, targets, num_classes)
    try:
        return Prototypes(vectors, _weight_variance(features, targets, vectors))
    except ValueError as error:
        raise InputError("real", f"{num_classes} classes", str(error)) from None


def _batches(split: ImageSplit, size: int = 256) -> Iterator[np.ndarray]:
    for start in range(0, len(split), size):
        yield split.images(np.arange(start, min(start + size, len(split))))


def _weight_variance(features: Tensor, targets: Tensor, vectors: Tensor) -> float:
    deviations = features - vectors[targets]  # [N, D]
    variances = []
    for second in range(len(vectors)):
        others = targets != second
        axis = vectors[targets[others]] - vectors[second]
        length_sq = (axis * axis).sum(1)
        if (length_sq < COINCIDE).any():
            raise ValueError("two prototypes coincide; does each class have images of its own?")
        variances.append(((deviations[others] * axis).sum(1) / length_sq).square())
    return float(torch.cat(variances).mean())


class Annotator:
    """Labels the images of groups.

    Args:
        prototypes: float32 [K, D].
        rule: projection or simplex.
        scale: sharpening of `data.labels.sharpen`, for the rule projection.
    """

    def __init__(
        self, encoder: ClipEncoder, prototypes: Tensor, *, rule: str = "projection", scale: float
    ) -> None:
        self.encoder = encoder
        self.prototypes = prototypes
        self.rule = rule
        self.scale = scale

    def features(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] -> float32 [N, D] on the CPU."""
        return self.encoder.encode(images).cpu()

    def label(self, features: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Raw coordinates and probabilities of a series' classes, both [A, k].

        Args:
            features: [A, D]; classes: the k classes of the series.
        """
        vertices = self.prototypes[list(classes)]
        if self.rule == "simplex":
            return coordinates(features, vertices), simplex_projection(features, vertices)
        first, second = (vertex.expand_as(features) for vertex in vertices)
        weight = projection_weight(features, first, second)
        probability = sharpen(weight, self.scale)
        return torch.stack([weight, 1 - weight], 1), torch.stack([probability, 1 - probability], 1)
