"""GeneratorConfig: the model, what it is told, and how it samples."""

from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from data.settings import Settings

PLACEHOLDER = "{class}"

SchedulerName = Literal["ddim", "dpmpp_2m", "unipc", "euler", "heun", "pndm"]


class LoraConfig(Settings):
    """Low-rank weights that are added to the model's own when it is loaded."""

    path: str = Field(description="a safetensors file, a directory, or a hub id")
    revision: str | None = Field(None, description="commit of a hub id")
    weight_name: str | None = Field(None, description="file in a directory that holds several")
    scale: float = Field(1.0, description="strength; 1 is full")


class ApproximationConfig(Settings):
    """Ways to the images that are faster and not exact; each passes the fidelity gate first."""

    scheduler: SchedulerName | None = Field(
        None, description="sampler instead of generator.scheduler"
    )
    steps: int | None = Field(None, ge=1, description="denoising steps instead of generator.steps")
    guidance_interval: tuple[float, float] | None = Field(
        None,
        description="guide only in these shares of the steps, as [0, 0.6]; the other steps take "
        "the conditional prediction alone (Kynkaanniemi et al. 2024)",
    )
    cache_steps: int = Field(
        1, ge=1, description="compute the deep U-Net features every n-th step (DeepCache)"
    )
    cache_anchors: int | None = Field(
        None,
        ge=2,
        description="alphas of a series whose deep U-Net features are computed; those of the "
        "others are interpolated along alpha",
    )
    tiny_decoder: str | None = Field(
        None, description="an AutoencoderTiny (TAESD) directory or hub id instead of the VAE"
    )
    tiny_decoder_revision: str | None = Field(None, description="commit of a hub id")
    gate_groups: int = Field(
        200, ge=20, description="series compared with the exact ones before anything is made"
    )
    accept_failure: bool = Field(
        False, description="go on where the fidelity gate fails; its verdict stays in the root"
    )

    @field_validator("guidance_interval")
    @classmethod
    def _is_interval(cls, interval: tuple[float, float] | None) -> tuple[float, float] | None:
        if interval is not None and not 0 <= interval[0] < interval[1] <= 1:
            raise ValueError("give two shares of the steps, 0 <= from < to <= 1")
        return interval

    @property
    def active(self) -> bool:
        """Whether any of them is switched on."""
        off = ApproximationConfig(gate_groups=self.gate_groups, accept_failure=self.accept_failure)
        return self != off


class GeneratorConfig(Settings):
    """The generative model and how it samples."""

    family: Literal["stable_diffusion", "sdxl", "dit"] = Field(
        "stable_diffusion",
        description="architecture: stable_diffusion (1.x, 2.x, SD-Turbo), sdxl (with SDXL-Turbo), "
        "dit (class-conditional DiT)",
    )
    model: str = Field(description="a diffusers directory or a hub id")
    revision: str | None = Field(
        None, description="commit of a hub id, 40 hexadecimal digits; none for a directory"
    )
    variant: str | None = Field(None, description="which of several weight files, as fp16")
    unet: str | None = Field(
        None, description="a fine-tuned U-Net instead of the model's own: a directory or hub id"
    )
    unet_revision: str | None = Field(None, description="commit of a hub id")
    lora: tuple[LoraConfig, ...] = Field((), description="low-rank weights, added in this order")
    prompt: str | tuple[str, ...] = Field(
        "a photo of a {class}",
        description="template for all classes, {class} becomes the name; several are averaged",
    )
    names: dict[str, str] = Field(
        {},
        description="what to call a class instead of its own name, as crane: crane bird; "
        "for dit the model's own label",
    )
    pad_names: bool = Field(
        False, description="fill short names with commas, so that all prompts end at one token"
    )
    steps: int = Field(20, ge=1, description="denoising steps of the deterministic sampler")
    guidance_scale: float = Field(
        7.5, ge=0, description="w in uncond + w (cond - uncond); at most 1 switches guidance off"
    )
    scheduler: SchedulerName | None = Field(
        None, description="deterministic sampler; none keeps the model's own"
    )
    timestep_spacing: Literal["leading", "linspace", "trailing"] | None = Field(
        None, description="of the sampler's steps; none keeps the model's; trailing for few steps"
    )
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="precision of the networks; latents stay float32"
    )
    compile: Literal["none", "regional", "full"] = Field(
        "none",
        description="torch.compile the denoiser: nothing; regional: its transformer blocks, all "
        "of a DiT's work but half of a Stable Diffusion U-Net's; full: all, which takes longer",
    )
    decode_batch: int | None = Field(
        None,
        ge=1,
        description="images in one VAE decode, which bounds its memory; none: as many as 8 GiB "
        "hold, at most 16: 16 up to 512 x 512, 4 of 1024 x 1024",
    )
    approximate: ApproximationConfig = ApproximationConfig()

    @field_validator("prompt")
    @classmethod
    def _names_the_class(cls, prompt: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not prompt:
            raise ValueError("give a template")
        for template in (prompt,) if isinstance(prompt, str) else prompt:
            if template.count(PLACEHOLDER) != 1:
                raise ValueError(f"{template!r} must contain {PLACEHOLDER} exactly once")
        return prompt

    @model_validator(mode="after")
    def _caches_fit_the_network(self) -> Self:
        approximate = self.approximate
        cache = "cache_anchors" if approximate.cache_anchors is not None else "cache_steps"
        if approximate.cache_anchors is None and approximate.cache_steps == 1:
            return self
        if self.family == "dit":
            raise ValueError(
                f"`approximate.{cache}` caches the features of a U-Net; family dit has none"
            )
        if self.compile == "full":
            raise ValueError(
                f"`approximate.{cache}` runs parts of the network; use `compile: regional` or none"
            )
        return self

    @field_validator("unet", "lora")
    @classmethod
    def _suits_the_family(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("family") == "dit":
            raise ValueError("family dit has no U-Net to change; leave it out")
        return value

    @property
    def templates(self) -> tuple[str, ...]:
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt
