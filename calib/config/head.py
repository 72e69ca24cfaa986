"""Stage two: which head is trained on the frozen network, and how."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from calib.config.optimiser import OptimiserConfig
from calib.config.parts import LOSSES, PartConfig, told
from data.settings import Settings


class HeadOptimiserConfig(OptimiserConfig):
    """As for the classifier, at one learning rate throughout."""

    schedule: Literal["multistep", "cosine", "constant"] = Field(
        "constant", description="of the learning rate; cosine falls to 0 with every step"
    )


class TSTOptimiserConfig(HeadOptimiserConfig):
    """TST's own: Adam, with neither weight decay nor clipping."""

    name: Literal["sgd", "adam", "adamw"] = Field("adam", description="optimiser")
    learning_rate: float = Field(1e-4, gt=0, description="at its highest")
    weight_decay: float = Field(0.0, ge=0, description="on all weights")
    clip_norm: float | None = Field(
        None, gt=0, description="largest norm of the head's gradient; none does not clip"
    )


class SecondStageConfig(Settings):
    """What every second stage has: a head trained on the frozen network, from real images alone."""

    epochs: int = Field(40, ge=1, description="passes over the real training images")
    batch_size: int = Field(128, ge=2, description="images a step, over all processes")
    optimiser: HeadOptimiserConfig = Field(HeadOptimiserConfig(), description="of the head")
    views: int | None = Field(
        None,
        ge=1,
        description="augmented views of each image whose features are made once and used in turn;"
        " none makes features anew each epoch, or once where nothing is augmented",
    )


class MaCCalConfig(SecondStageConfig):
    """MaC-Cal: a bottleneck head whose weights are masked anew each epoch."""

    method: Literal["mac_cal"] = Field("mac_cal", description="mac_cal, tst or vtst")
    loss: PartConfig = Field(
        PartConfig(name="ce"), description="on real images", json_schema_extra=told(LOSSES)
    )
    select: Literal["last", "ece"] = Field(
        "last", description="which epoch's head to keep; ece is that on validation"
    )
    hidden: int | None = Field(
        None, ge=1, description="width of the bottleneck; none: max(2 classes, features / 4)"
    )
    mask_mode: Literal["reset", "preserve"] = Field(
        "reset", description="masked weights become 0, or keep their value"
    )
    inference: Literal["last", "expected", "dense"] = Field(
        "last", description="weights in use after training: last mask, times p, or all"
    )
    allow_unscaled: bool = Field(False, description="permit inference: dense, for comparisons")
    p_start: float = Field(0.5, gt=0, le=1, description="share of weights kept in epoch 0")
    p_min: float = Field(0.1, gt=0, le=1, description="smallest share of weights kept")
    gamma: float = Field(
        0.9, gt=0, le=1, description="confidence aims at gamma times the training accuracy"
    )
    delta_max: float = Field(0.1, gt=0, le=1, description="largest change of the share at first")
    delta_min: float = Field(0.001, gt=0, le=1, description="largest change at the end")
    extra_pass: bool = Field(
        False, description="take accuracy and confidence from a pass of their own after each epoch"
    )


class TSTConfig(SecondStageConfig):
    """TST: a small network to a latent space and a linear layer, instead of the linear head."""

    method: Literal["tst", "vtst"] = Field("tst", description="vtst: a Gaussian latent space")
    optimiser: TSTOptimiserConfig = Field(TSTOptimiserConfig(), description="of the head")
    latent: int = Field(10, ge=1, description="width Z of the latent space")
    samples: int = Field(10, ge=1, description="vtst: latent draws averaged for a prediction")
    select: Literal["last", "nll"] = Field(
        "nll", description="which epoch's head to keep; nll is that on validation"
    )


def method(head: Any) -> str:
    """Of which method settings are, whatever was written. Errors name the field after this."""
    default = "mac_cal"
    if isinstance(head, dict):
        return str(head.get("method", default))
    return str(getattr(head, "method", default))


HeadConfig = Annotated[
    Annotated[MaCCalConfig, Tag("mac_cal")]
    | Annotated[TSTConfig, Tag("tst")]
    | Annotated[TSTConfig, Tag("vtst")],
    Discriminator(method),
]
