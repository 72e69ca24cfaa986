"""Heads for the second stage: MaC-Cal's masked bottleneck, TST's and VTST's latent networks."""

from typing import Any

from torch import nn

from calib.config.head import HeadConfig, MaCCalConfig
from calib.heads.bottleneck import MaskedBottleneckHead
from calib.heads.sparsity import SparsityController
from calib.heads.tst import TSTHead
from calib.heads.vtst import VTSTHead

__all__ = [
    "MaskedBottleneckHead",
    "SparsityController",
    "TSTHead",
    "VTSTHead",
    "build_head",
    "controller_params",
]


def build_head(config: HeadConfig, in_features: int, num_classes: int) -> nn.Module:
    """A fresh head, features [N, D] to logits [N, K]. Raises InputError for values it refuses."""
    if config.method == "mac_cal":
        SparsityController(base_accuracy=1.0, **controller_params(config))  # refuses in time
        return MaskedBottleneckHead(
            in_features,
            num_classes,
            hidden=config.hidden,
            mask_mode=config.mask_mode,
            inference=config.inference,
            allow_unscaled=config.allow_unscaled,
        )
    if config.method == "tst":
        return TSTHead(in_features, num_classes, latent=config.latent)
    return VTSTHead(in_features, num_classes, latent=config.latent, samples=config.samples)


def controller_params(config: MaCCalConfig) -> dict[str, Any]:
    """What `SparsityController` takes, besides what stage one found."""
    names = {"epochs", "p_start", "p_min", "gamma", "delta_max", "delta_min"}
    return config.model_dump(include=names)
