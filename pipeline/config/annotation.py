"""AnnotationConfig: how an image gets its soft label."""

from typing import Literal

from pydantic import Field, field_validator

from data.settings import Settings


class AnnotationConfig(Settings):
    """How an image gets its soft label."""

    model: str = Field(
        "ViT-B-32-quickgelu", description="open_clip model name, or local-dir:FOLDER"
    )
    pretrained: str | None = Field(
        None, description="open_clip weights tag or file; none for local-dir: and hf-hub: models"
    )
    rule: Literal["projection", "simplex"] = Field(
        "projection",
        description="projection: of the CLIP feature on the line between two prototypes, then "
        "sharpened; simplex: on the simplex of all prototypes of the series, as it is",
    )
    scale: float | Literal["auto"] = Field(
        "auto",
        description="sharpening s of sigmoid(s (weight - 1/2)); CSM takes 4 for CIFAR-10 and 2.3 "
        "for CIFAR-100; auto: inverse variance of the weight of real images, within [1, 20]",
    )

    @field_validator("scale")
    @classmethod
    def _is_positive(cls, scale: float | str) -> float | str:
        if not isinstance(scale, str) and scale <= 0:
            raise ValueError("must be positive, or auto")
        return scale
