"""Classifiers by name; all give logits and the features before the last layer."""

from collections.abc import Callable
from typing import Any

from semix.calib.models.base import ImageClassifier
from semix.calib.models.convnets import RESNETS, WIDE_RESNETS, LeNet, densenet121
from semix.calib.models.timm_models import TimmClassifier
from semix.calib.parameters import construct, look_up

MODELS: dict[str, Callable[..., ImageClassifier]] = {
    "lenet": LeNet,
    **RESNETS,
    **WIDE_RESNETS,
    "densenet121": densenet121,
    "timm": TimmClassifier,
}


def build_model(name: str, num_classes: int, **params: Any) -> ImageClassifier:
    """A classifier by name, with fresh weights from torch's global generator.

    Raises:
        InputError: an unknown name or parameter, or a value out of range.
    """
    kind = look_up(MODELS, name, field="model.name")
    return construct(kind, num_classes, params=params, field="model")
