"""The settings of a training run, and what is refused before it begins."""

from calib.config.checks import check, check_launch, check_parts, check_settings
from calib.config.evaluation import EvaluationConfig, ShiftConfig
from calib.config.head import HeadConfig, MaCCalConfig, TSTConfig
from calib.config.images import AugmentConfig, MixedConfig
from calib.config.optimiser import OptimiserConfig
from calib.config.parts import PartConfig
from calib.config.train import OUTSIDE_IDENTITY, Criterion, EarlyStopConfig, TrainConfig

__all__ = [
    "OUTSIDE_IDENTITY",
    "AugmentConfig",
    "Criterion",
    "EarlyStopConfig",
    "EvaluationConfig",
    "HeadConfig",
    "MaCCalConfig",
    "MixedConfig",
    "OptimiserConfig",
    "PartConfig",
    "ShiftConfig",
    "TSTConfig",
    "TrainConfig",
    "check",
    "check_launch",
    "check_parts",
    "check_settings",
]
