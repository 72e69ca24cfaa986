"""AnnotationConfig: how an image gets its soft label, and which CLIP models see it."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from data.settings import Settings


class EncoderConfig(Settings):
    """One CLIP model."""

    model: str = Field(
        description="open_clip model name; local-dir:FOLDER, of an open_clip directory; or "
        "hf-hub:OWNER/NAME"
    )
    pretrained: str | None = Field(
        None,
        description="open_clip weights tag, or a safetensors file; none for local-dir: and hf-hub: "
        "models",
    )
    revision: str | None = Field(
        None, description="commit of a hf-hub: model, 40 hexadecimal digits; none for others"
    )


class AnnotationConfig(EncoderConfig):
    """How an image gets its soft label."""

    model: str = Field(
        "ViT-B-32-quickgelu",
        description="open_clip model name; local-dir:FOLDER, of an open_clip directory; or "
        "hf-hub:OWNER/NAME",
    )
    rule: Literal["projection", "simplex", "similarity", "mixing_ratio"] = Field(
        "projection",
        description="projection: of the CLIP feature on the line between two prototypes, then "
        "sharpened; simplex: on the simplex of all prototypes of the series, as it is; "
        "similarity: shares of the similarity to the prototypes of all classes of the data; "
        "mixing_ratio: the conditioning weights, whatever CLIP sees (an ablation)",
    )
    scale: float | Literal["auto"] = Field(
        "auto",
        description="for projection: sharpening s of sigmoid(s (weight - 1/2)); CSM takes 4 for "
        "CIFAR-10 and 2.3 for CIFAR-100; auto: inverse variance of the weight of real images, "
        "within [1, 20]",
    )
    temperature: float | None = Field(
        None,
        gt=0,
        description="for similarity: shares of exp(cosine / temperature); none: of the cosine",
    )
    normalize: bool = Field(
        False, description="features and prototypes of length 1; CSM leaves them as they are"
    )
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32",
        description="precision of the CLIP models; features are float32 and stored as float16",
    )
    second: EncoderConfig | None = Field(
        None, description="another CLIP model, whose agreement with the first is stored"
    )

    @field_validator("scale")
    @classmethod
    def _is_positive(cls, scale: float | str) -> float | str:
        if not isinstance(scale, str) and scale <= 0:
            raise ValueError("must be positive, or auto")
        return scale

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.temperature is not None and self.rule != "similarity":
            raise ValueError("`temperature` belongs to rule similarity, and only to it")
        if self.scale != "auto" and self.rule != "projection":
            raise ValueError("`scale` belongs to rule projection, and only to it")
        if self.second == self.first:
            raise ValueError("`second` is the first model again; name another, or leave it out")
        return self

    @property
    def first(self) -> EncoderConfig:
        """The CLIP model whose features give the labels."""
        return EncoderConfig(model=self.model, pretrained=self.pretrained, revision=self.revision)

    @property
    def encoders(self) -> list[tuple[str, EncoderConfig]]:
        """One or two CLIP models, each with the path of its settings."""
        second = [] if self.second is None else [("annotation.second", self.second)]
        return [("annotation", self.first), *second]
