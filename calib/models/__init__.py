"""Classifiers by name; all give logits and the features before the last layer."""

from typing import Any

from semix.calib.config.model import ModelConfig
from semix.calib.models.base import ImageClassifier
from semix.data.settings import Settings, load_settings


class _Section(Settings):
    model: ModelConfig


def build_model(name: str, num_classes: int, **params: Any) -> ImageClassifier:
    """A classifier by name, with fresh weights from torch's global generator.

    Raises:
        InputError: an unknown name or parameter, or a value out of range.
    """
    settings = load_settings(_Section, {"model": {"name": name, **params}}).model
    model: ImageClassifier = settings.build(num_classes)
    return model
