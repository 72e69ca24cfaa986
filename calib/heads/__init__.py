"""Heads for the second stage: MaC-Cal's masked bottleneck with the rule that sets its sparsity."""

from torch import nn

from calib.config.head import HeadConfig, MaCCalConfig
from calib.heads.bottleneck import MaskedBottleneckHead
from calib.heads.sparsity import SparsityController

__all__ = ["MaskedBottleneckHead", "SparsityController", "build_head"]


def build_head(config: HeadConfig, in_features: int, num_classes: int) -> nn.Module:
    """A fresh head, features [N, D] to logits [N, K]. Raises InputError for values it refuses."""
    assert isinstance(config, MaCCalConfig)
    head = MaskedBottleneckHead(
        in_features,
        num_classes,
        hidden=config.hidden,
        mask_mode=config.mask_mode,
        inference=config.inference,
        allow_unscaled=config.allow_unscaled,
    )
    SparsityController(base_accuracy=1.0, **controller_params(config))
    return head


def controller_params(config: MaCCalConfig) -> dict[str, float]:
    """What `SparsityController` takes, besides what stage one found."""
    names = {"epochs", "p_start", "p_min", "gamma", "delta_max", "delta_min"}
    return config.model_dump(include=names)
