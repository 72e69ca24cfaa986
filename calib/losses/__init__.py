"""Losses by name: on real images with class targets, on mixed images with soft labels."""

from collections.abc import Callable
from typing import Any, get_args

from torch import Tensor

from semix.calib.config.loss import CorrectnessRankingConfig, LossConfig, MixedLossName
from semix.calib.losses.base import RealLoss, soft_cross_entropy, squared_error
from semix.data.errors import InputError, choices
from semix.data.settings import Settings, load_settings

MixedLoss = Callable[[Tensor, Tensor], Tensor]


class _Section(Settings):
    loss: LossConfig


def build_loss(name: str, num_classes: int, **params: Any) -> RealLoss:
    """A loss on real images, called as `(logits, targets, *, features=None, indices=None)`.

    Raises:
        InputError: an unknown name or parameter, or a value out of range.
    """
    settings = load_settings(_Section, {"loss": {"name": name, **params}}).loss
    loss: RealLoss = settings.build(num_classes)
    return loss


def build_training_loss(settings: LossConfig, num_classes: int, *, num_samples: int) -> RealLoss:
    """The loss of these settings; one that keeps a history of each sample gets `num_samples`.

    Args:
        num_samples: number of training images, the range of `indices`.
    Raises:
        InputError: it refuses a value.
    """
    if isinstance(settings, CorrectnessRankingConfig) and settings.num_samples is None:
        settings = settings.model_copy(update={"num_samples": num_samples})
    loss: RealLoss = settings.build(num_classes)
    return loss


def build_mixed_loss(name: MixedLossName) -> MixedLoss:
    """A loss on mixed images, called as `(logits, soft_labels)`.

    Raises:
        InputError: an unknown name.
    """
    if name not in get_args(MixedLossName):
        raise InputError("mixed.loss", name, choices(name, get_args(MixedLossName)))
    return squared_error if name == "l2" else soft_cross_entropy
