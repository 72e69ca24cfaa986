"""Settings of the training methods, by name: how a batch of real images becomes a loss."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from semix.calib.config.component import ComponentConfig
from semix.data.settings import one_of

Variant = Literal["code", "paper"]


class PlainConfig(ComponentConfig):
    """The loss of the images without mixing."""

    implementation: ClassVar = "semix.calib.methods.base:Plain"
    name: Literal["plain"] = "plain"


class MixupConfig(ComponentConfig):
    """Mixup. Source: Zhang et al. 2018."""

    implementation: ClassVar = "semix.calib.methods.mixing:Mixup"
    name: Literal["mixup"] = "mixup"
    alpha: float = Field(
        0.2, gt=0, description="of Beta(alpha, alpha); 0.2 for calibration, 1.0 for accuracy"
    )
    heavier: bool = Field(
        False, description="the image itself has the larger weight, as in MIT's code"
    )


class CutMixConfig(ComponentConfig):
    """CutMix. Source: Yun et al. 2019, section 3.1."""

    implementation: ClassVar = "semix.calib.methods.mixing:CutMix"
    name: Literal["cutmix"] = "cutmix"
    alpha: float = Field(1.0, gt=0, description="of Beta(alpha, alpha), the area")


class RegMixupConfig(ComponentConfig):
    """RegMixup: images and blends in one pass. Source: Pinto et al. 2022."""

    implementation: ClassVar = "semix.calib.methods.mixing:RegMixup"
    name: Literal["regmixup"] = "regmixup"
    alpha: float = Field(20.0, gt=0, description="of Beta(alpha, alpha); 10 for CIFAR-100")
    weight: float = Field(1.0, ge=0, description="of the blends' cross-entropy")
    variant: Variant = Field("code", description="the mean over images and blends, or the sum")


class RankMixupConfig(ComponentConfig):
    """RankMixup: confidences ranked by lambda. Source: Noh et al. 2023."""

    implementation: ClassVar = "semix.calib.methods.mixing:RankMixup"
    name: Literal["rankmixup"] = "rankmixup"
    kind: Literal["mrl", "mndcg"] = Field(
        "mrl", description="a margin of the largest logits, or the order of several confidences"
    )
    weight: float = Field(0.1, ge=0, description="of the ranking loss")
    alpha: float = Field(2.0, gt=0, description="of Beta(alpha, alpha); 1 for Tiny-ImageNet")
    margin: float = Field(2.0, ge=0, description="of mrl, in logits; 1 for Tiny-ImageNet")
    mixes: int | None = Field(
        None, ge=1, description="blends per image; none: 1 for mrl, 3 for mndcg"
    )
    variant: Variant = Field(
        "code", description="of mrl: how blends of one class count, see `margin_ranking`"
    )


class MITConfig(ComponentConfig):
    """MIT-L: two blends of each pair, decoupled. Source: Wang et al. 2023, and its code."""

    implementation: ClassVar = "semix.calib.methods.mixing:MIT"
    name: Literal["mit"] = "mit"
    alpha: float = Field(0.5, gt=0, description="of Beta(alpha, alpha)")
    margin: float = Field(0.5, ge=0, lt=1, description="smallest distance of the two lambdas")


class PLPConfig(ComponentConfig):
    """Progressively layer-peeled training. Source: Wang and Zhang 2024, and its code."""

    implementation: ClassVar = "semix.calib.methods.mixing:PLP"
    name: Literal["plp"] = "plp"
    gamma: float = Field(1.0, gt=0, description="below 1 layers freeze later")


class BalCALConfig(ComponentConfig):
    """BalCAL: a linear head and a simplex frame, balanced. Source: Ni et al. 2025."""

    implementation: ClassVar = "semix.calib.methods.balcal:BalCAL"
    name: Literal["balcal"] = "balcal"
    delta: float = Field(
        0.95, gt=0, le=1, description="target confidence, as a fraction of the training accuracy"
    )
    start: float = Field(0.8, ge=0, le=1, description="weight of the linear head at first")
    etf_scale: float = Field(1.0, gt=0, description="length of the frame's vectors")


METHODS: dict[str, type[ComponentConfig]] = {
    "plain": PlainConfig,
    "mixup": MixupConfig,
    "cutmix": CutMixConfig,
    "regmixup": RegMixupConfig,
    "rankmixup": RankMixupConfig,
    "mit": MITConfig,
    "plp": PLPConfig,
    "balcal": BalCALConfig,
}
if TYPE_CHECKING:
    MethodConfig = ComponentConfig
else:
    MethodConfig = one_of(METHODS)
