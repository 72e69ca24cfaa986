"""Settings of the classifiers, by name."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from semix.calib.config.component import ComponentConfig
from semix.data.settings import one_of

SMALL_STEM: Literal["small"] = "small"  # a 3x3 convolution
IMAGENET_STEM: Literal["imagenet"] = "imagenet"  # a 7x7 convolution of stride 2, then max pooling
IMAGENET_STEM_MIN_SIDE = 96  # pixels; smaller images would end in feature maps of at most 2 x 2


class LeNetConfig(ComponentConfig):
    """LeNet-5 with ReLU and max pooling. Source: LeCun et al. 1998."""

    implementation: ClassVar = "semix.calib.models.convnets:LeNet"
    name: Literal["lenet"] = "lenet"
    width: int = Field(1, ge=1, description="multiplies every layer; 84 width features")


class SmallResNetConfig(ComponentConfig):
    """ResNets of three stages, for small images. Source: He et al. 2016, section 4.2."""

    implementation: ClassVar = "semix.calib.models.convnets:small_resnet"
    name: Literal[
        "resnet8", "resnet14", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110"
    ]
    width: int = Field(16, ge=1, description="channels of the first stage; 4 width features")


class ResNetConfig(ComponentConfig):
    """ResNets of four stages. Source: He et al. 2016, table 1."""

    implementation: ClassVar = "semix.calib.models.convnets:resnet"
    name: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    width: int = Field(64, ge=1, description="channels of the first stage, before expansion")
    stem: Literal["small", "imagenet"] = Field(
        SMALL_STEM,
        description=f"a 3x3 convolution; or ImageNet's, a 7x7 convolution of stride 2 and max "
        f"pooling, which is the default where real.image_size is {IMAGENET_STEM_MIN_SIDE} or more",
    )


class PaperResNetConfig(ComponentConfig):
    """Further ResNets of focal_calibration and of the papers that build on it.

    Those for Tiny-ImageNet keep the last feature map as 2 x 2 pixels.
    """

    implementation: ClassVar = "semix.calib.models.convnets:paper_resnet"
    name: Literal[
        "resnet110_bottleneck",
        "resnet18_tiny",
        "resnet34_tiny",
        "resnet50_tiny",
        "resnet101_tiny",
        "resnet152_tiny",
        "resnet110_bottleneck_tiny",
    ]
    width: int = Field(64, ge=1, description="channels of the first stage, before expansion")


class WideResNetConfig(ComponentConfig):
    """WideResNets. Source: Zagoruyko and Komodakis 2016; wrn26_10 is focal_calibration's."""

    implementation: ClassVar = "semix.calib.models.convnets:wide_resnet"
    name: Literal["wrn26_10", "wrn28_10", "wrn40_2"]


class DenseNetConfig(ComponentConfig):
    """DenseNet-121, with the stem of focal_calibration. Source: Huang et al. 2017."""

    implementation: ClassVar = "semix.calib.models.convnets:densenet121"
    name: Literal["densenet121"] = "densenet121"


class TimmConfig(ComponentConfig):
    """Any network of timm that ends in one linear layer; nothing is downloaded."""

    implementation: ClassVar = "semix.calib.models.timm_models:TimmClassifier"
    name: Literal["timm"] = "timm"
    architecture: str = Field("", description="a name of `timm.list_models()`, such as resnet50")
    weights: str | None = Field(
        None,
        description="a safetensors file of that architecture; none: random weights. A last layer "
        "of other classes is not used",
    )
    feature: Literal["post_norm", "pre_norm"] = Field(
        "post_norm",
        description="the input of the last layer, or that of a vision transformer's last norm",
    )
    image_size: int | None = Field(
        None, ge=1, description="pixels, of architectures of a fixed size; none: their own"
    )


KINDS: tuple[type[ComponentConfig], ...] = (
    LeNetConfig,
    SmallResNetConfig,
    ResNetConfig,
    PaperResNetConfig,
    WideResNetConfig,
    DenseNetConfig,
    TimmConfig,
)
MODELS: dict[str, type[ComponentConfig]] = {name: kind for kind in KINDS for name in kind.names()}
if TYPE_CHECKING:
    ModelConfig = ComponentConfig
else:
    ModelConfig = one_of(MODELS)
