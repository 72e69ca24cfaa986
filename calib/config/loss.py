"""Settings of the losses by name."""

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from semix.calib.config.component import ComponentConfig
from semix.data.settings import one_of

Variant = Literal["code", "paper"]


class CrossEntropyConfig(ComponentConfig):
    """Cross-entropy."""

    implementation: ClassVar = "semix.calib.losses.base:CrossEntropy"
    name: Literal["ce"] = "ce"


class LabelSmoothingConfig(ComponentConfig):
    """Label smoothing. Source: Szegedy et al. 2016, section 7."""

    implementation: ClassVar = "semix.calib.losses.smoothing:LabelSmoothing"
    name: Literal["ls"] = "ls"
    smoothing: float = Field(
        0.05,
        ge=0,
        le=1,
        description="fraction of the label that is spread over all classes; 0.1 is usual for "
        "CIFAR-100",
    )


class MarginLabelSmoothingConfig(ComponentConfig):
    """MbLS: a penalty on logits further below the largest than a margin.

    Source: Liu et al. 2022, The Devil is in the Margin, and its code.
    """

    implementation: ClassVar = "semix.calib.losses.smoothing:MarginLabelSmoothing"
    name: Literal["mbls"] = "mbls"
    margin: float = Field(6.0, ge=0, description="6 for CIFAR, 10 for Tiny-ImageNet")
    weight: float = Field(
        0.1, ge=0, description="of the penalty, a mean over classes; the paper's formula has a sum"
    )


class AdaptiveConditionalLabelSmoothingConfig(ComponentConfig):
    """ACLS: penalties on the largest logit and on the others. Source: Park et al. 2023."""

    implementation: ClassVar = "semix.calib.losses.smoothing:AdaptiveConditionalLabelSmoothing"
    name: Literal["acls"] = "acls"
    margin: float = Field(10.0, ge=0, description="6 for CIFAR, 10 for Tiny-ImageNet")
    positive: float = Field(1.0, ge=0, description="weight of the largest logit above the margin")
    negative: float = Field(0.1, ge=0, description="weight of the other logits below it")
    weight: float = Field(0.1, ge=0, description="of both penalties together")


class FocalConfig(ComponentConfig):
    """Focal loss. Source: Lin et al. 2017; for calibration, Mukhoti et al. 2020."""

    implementation: ClassVar = "semix.calib.losses.focal:Focal"
    name: Literal["focal"] = "focal"
    gamma: float = Field(3.0, ge=0, description="0 is cross-entropy")


class FLSD53Config(ComponentConfig):
    """Focal loss whose gamma depends on the sample, 5 or 3. Source: Mukhoti et al. 2020."""

    implementation: ClassVar = "semix.calib.losses.focal:FLSD53"
    name: Literal["flsd53"] = "flsd53"


class DualFocalConfig(ComponentConfig):
    """Dual focal loss. Source: Tao et al. 2023, and its code."""

    implementation: ClassVar = "semix.calib.losses.focal:DualFocal"
    name: Literal["dual_focal"] = "dual_focal"
    gamma: float = Field(5.0, ge=0, description="0 is cross-entropy; the paper tunes it")


class AdaFocalConfig(ComponentConfig):
    """Focal loss whose gamma follows the calibration of each bin. Source: Ghosh et al. 2022."""

    implementation: ClassVar = "semix.calib.losses.focal:AdaFocal"
    name: Literal["ada_focal"] = "ada_focal"
    bins: int = Field(15, ge=1, description="bins of confidence, each with its own gamma")
    gamma: float = Field(1.0, description="of all bins in the first epoch, between the limits")
    rate: float = Field(1.0, ge=0, le=1e3, description="lambda: how fast gamma follows the gap")
    switch: float = Field(
        0.2, ge=0, description="size of gamma below which its sign changes; 0: never"
    )
    gamma_min: float = Field(-2.0, ge=-1e3, le=0, description="lower limit of gamma")
    gamma_max: float = Field(20.0, ge=0, le=1e3, description="upper limit of gamma")

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if not self.gamma_min <= self.gamma <= self.gamma_max:
            raise ValueError(
                f"`gamma` is {self.gamma:g}: must lie in [{self.gamma_min:g}, {self.gamma_max:g}]"
            )
        if self.switch > self.gamma_max:
            raise ValueError(f"`switch` is {self.switch:g}: must lie in [0, {self.gamma_max:g}]")
        return self


class MMCEConfig(ComponentConfig):
    """MMCE: a kernel measure of calibration as a penalty. Source: Kumar et al. 2018."""

    implementation: ClassVar = "semix.calib.losses.penalties:MMCE"
    name: Literal["mmce"] = "mmce"
    weight: float = Field(1.0, ge=0, description="of the penalty")
    bandwidth: float = Field(0.4, gt=0, description="of the kernel")
    variant: Variant = Field("code", description="the squared measure, or the measure")


class WeightedMMCEConfig(ComponentConfig):
    """MMCE with right and wrong samples apart. Source: Kumar et al. 2018; focal_calibration."""

    implementation: ClassVar = "semix.calib.losses.penalties:WeightedMMCE"
    name: Literal["mmce_weighted"] = "mmce_weighted"
    weight: float = Field(2.0, ge=0, description="of the penalty; 2 for CIFAR")
    bandwidth: float = Field(0.4, gt=0, description="of the kernel")
    variant: Variant = Field(
        "code", description="code divides by the number of pairs twice, so its penalty is tiny"
    )


class MDCAConfig(ComponentConfig):
    """MDCA: mean confidence against frequency of each class. Source: Hebbalaguppe et al. 2022."""

    implementation: ClassVar = "semix.calib.losses.penalties:MDCA"
    name: Literal["mdca"] = "mdca"
    weight: float = Field(1.0, ge=0, description="of the penalty; 1 in the official scripts")
    base: Literal["ce", "focal"] = Field("ce", description="the loss to which it is added")
    gamma: float = Field(1.0, ge=0, description="of the focal base")


class EntropyConfidencePenaltyConfig(ComponentConfig):
    """Confidence penalty: minus the entropy of the prediction. Source: Pereyra et al. 2017."""

    implementation: ClassVar = "semix.calib.losses.penalties:EntropyConfidencePenalty"
    name: Literal["ecp"] = "ecp"
    weight: float = Field(0.1, ge=0, description="of the entropy, which is subtracted")
    smoothing: float = Field(
        0.0,
        ge=0,
        le=1,
        description="that of ls, which takes the place of the cross-entropy (Roschewitz et al. "
        "2025, arXiv 2507.07780)",
    )
    variant: Variant = Field("code", description="the entropy's mean over classes, or its sum")


class BrierConfig(ComponentConfig):
    """The Brier score. Source: Brier 1950; as a training loss, Mukhoti et al. 2020."""

    implementation: ClassVar = "semix.calib.losses.base:Brier"
    name: Literal["brier"] = "brier"


class PairwiseConstraintsConfig(ComponentConfig):
    """CPC: pairwise constraints on logits. Source: Cheng and Vasconcelos 2022."""

    implementation: ClassVar = "semix.calib.losses.penalties:PairwiseConstraints"
    name: Literal["cpc"] = "cpc"
    binary_weight: float = Field(
        0.1, ge=0, description="of the true class against each other class"
    )
    exclusion_weight: float = Field(1.0, ge=0, description="of pairs of the other classes")
    variant: Variant = Field(
        "code", description="code also sums over equal pairs, which changes no gradient"
    )


class CorrectnessRankingConfig(ComponentConfig):
    """CRL: confidence ranked as the past correctness of samples. Source: Moon et al. 2020."""

    implementation: ClassVar = "semix.calib.losses.penalties:CorrectnessRanking"
    name: Literal["crl"] = "crl"
    weight: float = Field(1.0, ge=0, description="of the penalty")
    confidence: Literal["softmax", "entropy", "margin"] = Field(
        "softmax", description="what is compared with the past correctness"
    )
    num_samples: int | None = Field(
        None, ge=1, description="images of the training set; none: those of the run"
    )
    variant: Variant = Field(
        "code", description="correctness relative to the least correct sample, or a fraction"
    )


class FeDLaSConfig(ComponentConfig):
    """What both losses of FeDLaS share."""

    beta: float = Field(..., ge=0, le=1e6, description="slope of the strength; 0 switches it off")
    momentum: float = Field(
        0.95, gt=0, le=1, description="weight of a new batch in the statistics of feature norms"
    )
    norm_start: Literal["fixed", "first_batch"] = Field(
        "fixed",
        description="statistics at the start: mean 20, deviation 100; or of the first batch",
    )
    variant: Variant = Field("code", description="which output of the gate raises the strength")


class FeDLaSLabelSmoothingConfig(FeDLaSConfig):
    """FeDLaS-LS: label smoothing by the distance of features. Source: FeDLaS, and its code."""

    implementation: ClassVar = "semix.calib.losses.fedlas:FeDLaSLabelSmoothing"
    name: Literal["fedlas_ls"] = "fedlas_ls"
    smoothing: float = Field(
        0.05, ge=0, le=0.5, description="base strength; 0.05 is usual, 0.1 for CIFAR-100"
    )
    beta: float = Field(
        4.0, ge=0, le=1e6, description="slope of the strength; 0 is label smoothing"
    )


class FeDLaSMarginSmoothingConfig(FeDLaSConfig):
    """FeDLaS-MbLS: MbLS's penalty by the distance of features. Source: FeDLaS, and its code."""

    implementation: ClassVar = "semix.calib.losses.fedlas:FeDLaSMarginSmoothing"
    name: Literal["fedlas_mbls"] = "fedlas_mbls"
    weight: float = Field(
        0.1, ge=0, le=0.5, description="base strength; 0.1 for CIFAR, 0.05 for Tiny-ImageNet"
    )
    margin: float = Field(6.0, ge=0, description="6 for CIFAR, 10 for Tiny-ImageNet")
    beta: float = Field(0.5, ge=0, le=1e6, description="slope of the strength; 1 for CIFAR-100")
    variant: Variant = Field(
        "code",
        description="which output of the gate raises the strength; the penalty's mean over "
        "classes, or its sum",
    )


LOSSES: dict[str, type[ComponentConfig]] = {
    "ce": CrossEntropyConfig,
    "ls": LabelSmoothingConfig,
    "mbls": MarginLabelSmoothingConfig,
    "acls": AdaptiveConditionalLabelSmoothingConfig,
    "focal": FocalConfig,
    "flsd53": FLSD53Config,
    "dual_focal": DualFocalConfig,
    "ada_focal": AdaFocalConfig,
    "mmce": MMCEConfig,
    "mmce_weighted": WeightedMMCEConfig,
    "mdca": MDCAConfig,
    "ecp": EntropyConfidencePenaltyConfig,
    "brier": BrierConfig,
    "cpc": PairwiseConstraintsConfig,
    "crl": CorrectnessRankingConfig,
    "fedlas_ls": FeDLaSLabelSmoothingConfig,
    "fedlas_mbls": FeDLaSMarginSmoothingConfig,
}
if TYPE_CHECKING:
    LossConfig = ComponentConfig
else:
    LossConfig = one_of(LOSSES)
MixedLossName = Literal["l2", "soft_ce"]  # losses on mixed images
