"""CLIP features to soft labels: class prototypes, projection weights, sharpening, rules."""

from torch import Tensor

from data.labels import sharpen, soft_labels
from pipeline.annotation.annotator import Annotator, build_annotator
from pipeline.annotation.encoders import FEATURES, SECOND, Encoders
from pipeline.annotation.rules import projection_weight, similarity_labels
from pipeline.annotation.statistics import ClassSums

__all__ = [
    "FEATURES",
    "SECOND",
    "Annotator",
    "Encoders",
    "build_annotator",
    "class_prototypes",
    "projection_weight",
    "sharpen",
    "similarity_labels",
    "soft_labels",
]


def class_prototypes(features: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """Mean feature of each class; features are not normalised (CSM, `annotate.py`).

    Summed in float64, so that batches and their order do not show.

    Args:
        features: [N, D]; targets: int64 [N].
    Returns:
        [K, D], of the features' type.
    Raises:
        ValueError: a class has no features.
    """
    sums = ClassSums(num_classes)
    sums.add(features, targets)
    return sums.means().to(features.dtype)
