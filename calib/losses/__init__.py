"""Losses by name: on real images with class targets, on mixed images with soft labels."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from semix.calib.losses.base import Brier, CrossEntropy, RealLoss, soft_cross_entropy, squared_error
from semix.calib.losses.fedlas import FeDLaSLabelSmoothing, FeDLaSMarginSmoothing
from semix.calib.losses.focal import FLSD53, AdaFocal, DualFocal, Focal
from semix.calib.losses.penalties import (
    MDCA,
    MMCE,
    CorrectnessRanking,
    EntropyConfidencePenalty,
    PairwiseConstraints,
    WeightedMMCE,
)
from semix.calib.losses.smoothing import (
    AdaptiveConditionalLabelSmoothing,
    LabelSmoothing,
    MarginLabelSmoothing,
)
from semix.calib.parameters import construct, look_up

MixedLoss = Callable[[Tensor, Tensor], Tensor]

REAL_LOSSES: dict[str, type[RealLoss]] = {
    "ce": CrossEntropy,
    "ls": LabelSmoothing,
    "mbls": MarginLabelSmoothing,
    "acls": AdaptiveConditionalLabelSmoothing,
    "focal": Focal,
    "flsd53": FLSD53,
    "dual_focal": DualFocal,
    "ada_focal": AdaFocal,
    "mmce": MMCE,
    "mmce_weighted": WeightedMMCE,
    "mdca": MDCA,
    "ecp": EntropyConfidencePenalty,
    "brier": Brier,
    "cpc": PairwiseConstraints,
    "crl": CorrectnessRanking,
    "fedlas_ls": FeDLaSLabelSmoothing,
    "fedlas_mbls": FeDLaSMarginSmoothing,
}
MIXED_LOSSES: dict[str, MixedLoss] = {"l2": squared_error, "soft_ce": soft_cross_entropy}


def build_loss(name: str, num_classes: int, **params: Any) -> RealLoss:
    """A loss on real images, called as `(logits, targets, *, features=None, indices=None)`.

    Raises:
        InputError: an unknown name or parameter, or a value out of range.
    """
    return construct(
        look_up(REAL_LOSSES, name, field="loss.name"), num_classes, params=params, field="loss"
    )


def build_training_loss(
    name: str, num_classes: int, *, num_samples: int, params: Mapping[str, Any]
) -> RealLoss:
    """As `build_loss`; a loss that keeps a history of each sample also gets `num_samples`.

    Args:
        num_samples: number of training images, the range of `indices`.
    """
    kind = look_up(REAL_LOSSES, name, field="loss.name")
    if "num_samples" in inspect.signature(kind).parameters:
        params = {"num_samples": num_samples, **params}
    return build_loss(name, num_classes, **params)


def build_mixed_loss(name: str) -> MixedLoss:
    """A loss on mixed images, called as `(logits, soft_labels)`.

    Raises:
        InputError: an unknown name.
    """
    return look_up(MIXED_LOSSES, name, field="mixed.loss")
