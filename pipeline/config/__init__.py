"""BuildConfig: everything that decides what a mixed dataset contains."""

from typing import Self

from pydantic import model_validator

from data.real import RealDataConfig
from data.settings import Settings
from pipeline.config.annotation import AnnotationConfig, EncoderConfig
from pipeline.config.generator import (
    PLACEHOLDER,
    ApproximationConfig,
    GeneratorConfig,
    LoraConfig,
)
from pipeline.config.mixing import MixingConfig, PairsConfig
from pipeline.config.noise import NoiseConfig
from pipeline.config.shards import ShardConfig

__all__ = [
    "PLACEHOLDER",
    "AnnotationConfig",
    "ApproximationConfig",
    "BuildConfig",
    "EncoderConfig",
    "GeneratorConfig",
    "LoraConfig",
    "MixingConfig",
    "NoiseConfig",
    "PairsConfig",
    "ShardConfig",
]


class BuildConfig(Settings):
    """A mixed dataset. Two equal configs make equal shards on equal hardware and versions."""

    real: RealDataConfig
    generator: GeneratorConfig
    mixing: MixingConfig
    noise: NoiseConfig = NoiseConfig()
    annotation: AnnotationConfig
    shards: ShardConfig = ShardConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.mixing.classes > 2 and self.annotation.rule == "projection":
            raise ValueError(
                "`mixing.classes` above 2 wants `annotation.rule: simplex`, similarity or "
                "mixing_ratio; projection knows two classes"
            )
        anchors = self.generator.approximate.cache_anchors
        if anchors is not None and not (self.mixing.classes == 2 and anchors < self.mixing.images):
            raise ValueError(
                "`generator.approximate.cache_anchors` wants pairs of classes, and fewer anchors "
                "than alphas"
            )
        return self
