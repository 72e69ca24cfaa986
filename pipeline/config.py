"""BuildConfig: everything that decides what a mixed dataset contains."""

from typing import Literal

from pydantic import Field, field_validator

from data.real import RealDataConfig
from data.settings import Settings

PLACEHOLDER = "{class}"


class GeneratorConfig(Settings):
    """The text-to-image model and how it samples."""

    family: Literal["stable_diffusion"] = Field(
        "stable_diffusion", description="architecture of the model (Stable Diffusion 1.x/2.x)"
    )
    model: str = Field(description="a diffusers directory or a hub id")
    revision: str | None = Field(None, description="commit of a hub id; none takes its newest")
    prompt: str = Field(
        "a photo of a {class}", description="one template for all; {class} becomes the class name"
    )
    steps: int = Field(20, ge=1, description="denoising steps of the deterministic sampler")
    guidance_scale: float = Field(
        7.5, ge=0, description="w in uncond + w (cond - uncond); at most 1 switches guidance off"
    )
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="precision of the network"
    )

    @field_validator("prompt")
    @classmethod
    def _names_the_class(cls, prompt: str) -> str:
        if prompt.count(PLACEHOLDER) != 1:
            raise ValueError(f"must contain {PLACEHOLDER} exactly once")
        return prompt


class MixingConfig(Settings):
    """Which series are made."""

    alphas: int | tuple[float, ...] = Field(
        8, description="images a series, evenly from 0 to 1; or the weights of the first class"
    )
    groups_per_pair: int = Field(
        ge=1, description="series of each unordered pair of classes, each from a noise of its own"
    )
    interpolation: Literal["linear"] = Field(
        "linear", description="path between the two prompt embeddings"
    )
    seed: int = Field(0, ge=0, description="seed of all initial noises")

    @field_validator("alphas")
    @classmethod
    def _lie_in_range(cls, alphas: int | tuple[float, ...]) -> int | tuple[float, ...]:
        if isinstance(alphas, int):
            if not 2 <= alphas <= 100:
                raise ValueError("give 2 to 100 images a series")
            return alphas
        if not 2 <= len(alphas) <= 100:
            raise ValueError("give 2 to 100 alphas")
        for alpha in alphas:
            if not 0 <= alpha <= 1:
                raise ValueError(f"{alpha} must lie in [0, 1]; 1 is the first class")
        return alphas


class AnnotationConfig(Settings):
    """How an image gets its soft label."""

    model: str = Field(
        "ViT-B-32-quickgelu", description="open_clip model name, or local-dir:FOLDER"
    )
    pretrained: str | None = Field(
        None, description="open_clip weights tag or file; none for local-dir: and hf-hub: models"
    )
    rule: Literal["projection"] = Field(
        "projection", description="projection of the CLIP feature on the line between prototypes"
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


class ShardConfig(Settings):
    """How groups are batched and stored."""

    groups_per_shard: int = Field(
        64, ge=1, description="groups in one tar; aim at 1 to 5 minutes of work, a kill loses one"
    )
    groups_per_batch: int = Field(
        8, ge=1, description="groups in one forward pass; part of the identity, it moves last bits"
    )
    image_format: Literal["webp", "png", "jpg"] = Field(
        "webp", description="webp and png are lossless; jpg moves labels"
    )
    store_size: int | None = Field(
        None, ge=8, description="side of the stored images, pixels; none keeps the model's"
    )


class BuildConfig(Settings):
    """A mixed dataset. Two equal configs make equal shards on equal hardware and versions."""

    real: RealDataConfig
    generator: GeneratorConfig
    mixing: MixingConfig
    annotation: AnnotationConfig
    shards: ShardConfig = ShardConfig()
