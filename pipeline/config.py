"""The settings of a mixed dataset, which decide all of its content."""

import math
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from semix.data.formats import MAX_SERIES, ImageFormat, PairWeighting
from semix.data.settings import Settings
from semix.data.splits import RealDataConfig

MAX_SHARDS_OF_SMALL_PLAN = 16  # enough to show progress, and to lose little by a kill
MAX_DERIVED_SIZE = 64  # groups per shard of a large plan
PLACEHOLDER = "{class}"
CLIP_MODEL = (
    "open_clip model name; local-dir:FOLDER, of an open_clip directory; or hf-hub:OWNER/NAME"
)

Family = Literal["stable_diffusion", "sdxl", "dit", "pixel", "sd3", "flux", "flux2", "z_image"]
# The diffusers pipeline of each family, which its model_index.json names.
PIPELINES: dict[Family, str] = {
    "stable_diffusion": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "dit": "DiTPipeline",
    "pixel": "ConsistencyModelPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "flux2": "Flux2KleinPipeline",
    "z_image": "ZImagePipeline",
}
# Pipelines that hold a UNet2DModel and a scheduler, as models of family pixel do.
PIXEL_PIPELINES = ("ConsistencyModelPipeline", "DDIMPipeline", "DDPMPipeline")
FLOW_FAMILIES: tuple[Family, ...] = ("sd3", "flux", "flux2", "z_image")
SchedulerName = Literal["ddim", "dpmpp_2m", "unipc", "euler", "heun", "pndm", "deis"]


class LoraConfig(Settings):
    """Low-rank weights that are added to the model's weights when it is loaded."""

    path: str = Field(description="a safetensors file, a directory, or a hub id")
    revision: str | None = Field(None, description="commit of a hub id")
    weight_name: str | None = Field(None, description="file in a directory that holds several")
    scale: float = Field(1.0, description="strength; 1 is full")


EnhancerName = Literal["zigzag", "weak_to_strong", "reflect"]


class EnhanceConfig(Settings):
    """Going back and forth at each step of sampling, so that images show more of their prompt."""

    name: EnhancerName = Field(
        description="zigzag (Z-Sampling): back without the prompt; weak_to_strong (W2SD): back "
        "without guidance; both of DDIM; reflect (RF-Sampling): back with a weaker prompt, of sd3 "
        "and flux"
    )
    until: float = Field(
        1.0, gt=0, le=1, description="the steps in this first fraction of all; never the last one"
    )
    weak_guidance: float | None = Field(
        None,
        ge=0,
        description="of the step back, for zigzag and weak_to_strong: 0 without the prompt, 1 with "
        "it and without guidance; none: 0 and 1",
    )
    weak_lora: float | None = Field(
        None,
        description="for weak_to_strong: factor of the scale of all LoRAs in the step back, such "
        "as -1; a second network is kept in memory",
    )
    ahead_strength: float = Field(
        9.0, description="for reflect: s of the way ahead; 9 for sd3, 3.5 for FLUX.1-dev"
    )
    back_strength: float = Field(
        -1.0, description="s of the way back; -1 for sd3, 0 for FLUX.1-dev"
    )
    ahead_null: float = Field(0.3, ge=0, le=1, description="share of the empty prompt ahead")
    back_null: float = Field(0.7, ge=0, le=1, description="share of the empty prompt back")
    reflect_steps: int = Field(1, ge=1, description="for reflect: steps ahead, and back")
    merge: float = Field(
        0.5, ge=0, le=1, description="for reflect: part of the change that is kept"
    )

    @field_validator("weak_guidance")
    @classmethod
    def _is_weak_or_guided(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 1:
            raise ValueError("give 0 (no prompt), 1 (no guidance), or more")
        return value

    @property
    def back_guidance(self) -> float:
        """Guidance of the step back: 0 is unconditional, 1 the condition alone."""
        if self.weak_guidance is not None:
            return self.weak_guidance
        return 0.0 if self.name == "zigzag" else 1.0

    def enhances(self, call: int, calls: int) -> bool:
        """Whether a step of a sampling is enhanced."""
        return call < calls - 1 and call / calls < self.until

    def added_rows(self, call: int, calls: int, *, guided: bool) -> int:
        """Network rows that are added to those of one image's step, which has two if guided."""
        if not self.enhances(call, calls):
            return 0
        if self.name == "reflect":
            return 2 * min(self.reflect_steps, calls - 1 - call)
        return (2 if self.back_guidance > 1 else 1) + 1 + guided


class GeneratorConfig(Settings):
    """The generative model and how it samples."""

    family: Family = Field(
        "stable_diffusion",
        description="architecture: stable_diffusion (1.x, 2.x, SD-Turbo), sdxl (with SDXL-Turbo), "
        "dit (class-conditional DiT), pixel (class-conditional U-Nets without VAE: consistency "
        "models, EDM, DDPM), sd3 (Stable Diffusion 3 and 3.5), flux (FLUX.1 dev, schnell)"
        ", flux2 (FLUX.2 klein), z_image (Z-Image)",
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
        description="another name for a class in prompts, for example crane: crane bird; "
        "for dit the model's own label",
    )
    pad_names: bool = Field(
        False, description="fill short names with commas, so that all prompts end at one token"
    )
    prompt_length: int = Field(
        256,
        ge=1,
        le=512,
        description="flow models only: tokens that T5 or Qwen3 reads, to which prompts are filled, "
        "but for z_image; FLUX.1-dev and FLUX.2 were published with 512",
    )
    image_size: int | None = Field(
        None,
        ge=16,
        description="flow models only: side of the images in pixels; none: the model's own, 1024",
    )
    steps: int = Field(20, ge=1, description="denoising steps of the deterministic sampler")
    guidance_scale: float = Field(
        7.5,
        ge=0,
        description="w in uncond + w (cond - uncond), or the scale that FLUX.1-dev takes; at most "
        "1 switches guidance off",
    )
    guidance_interval: tuple[float, float] = Field(
        (0.0, 1.0),
        description="guide only in this range of the steps, as [0, 0.6]; the others take the "
        "conditional prediction alone: faster, and not the same images (Kynkaanniemi et al. 2024)",
    )
    enhance: EnhanceConfig | None = Field(
        None,
        description="enhance each step of sampling; two to three times the network calls",
        exclude_if=lambda value: value is None,
    )
    scheduler: SchedulerName | None = Field(
        None, description="deterministic sampler; none keeps the model's own"
    )
    timestep_spacing: Literal["leading", "linspace", "trailing"] | None = Field(
        None, description="spacing of the steps; none keeps the model's; use trailing for few steps"
    )
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="precision of the networks; latents stay float32"
    )
    offload: Literal["none", "model"] = Field(
        "none",
        description="model: each network is on the GPU only while it computes, otherwise in the "
        "machine's memory; slower, for GPUs with too little memory",
    )
    compile: Literal["none", "regional", "full"] = Field(
        "none",
        description="torch.compile: none; regional: the denoiser's transformer blocks, all "
        "of a DiT's work but half of a Stable Diffusion U-Net's; full: all, compiled more slowly",
    )
    decode_batch: int | None = Field(
        None,
        ge=1,
        description="images per VAE decode, which bounds its memory; none: as many as 8 GiB "
        "hold, at most 16: 16 up to 512 x 512, 4 of 1024 x 1024",
    )
    tiny_decoder: str | None = Field(
        None,
        description="an AutoencoderTiny (TAESD) directory or hub id instead of the VAE: faster, "
        "and not the same images",
    )
    tiny_decoder_revision: str | None = Field(None, description="commit of a hub id")

    @field_validator("prompt")
    @classmethod
    def _names_the_class(cls, prompt: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not prompt:
            raise ValueError("give a template")
        for template in (prompt,) if isinstance(prompt, str) else prompt:
            if template.count(PLACEHOLDER) != 1:
                raise ValueError(f"{template!r} must contain {PLACEHOLDER} exactly once")
        return prompt

    @field_validator("guidance_interval")
    @classmethod
    def _is_interval(cls, interval: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= interval[0] < interval[1] <= 1:
            raise ValueError("give two fractions of the steps, 0 <= from < to <= 1")
        return interval

    @field_validator("unet", "lora")
    @classmethod
    def _family_has_unet(cls, value: Any, info: ValidationInfo) -> Any:
        family = info.data.get("family")
        if value and family not in ("stable_diffusion", "sdxl"):
            raise ValueError(f"family {family} has no U-Net to change; leave it out")
        return value

    @model_validator(mode="after")
    def _settings_fit_family(self) -> Self:
        flow_defaults = {"prompt_length": 256, "image_size": None}
        for name, default in flow_defaults.items():
            if self.family not in FLOW_FAMILIES and getattr(self, name) != default:
                raise ValueError(f"`{name}` is of families {', '.join(FLOW_FAMILIES)}")
        if self.family == "pixel" and self.guidance_scale > 1:
            raise ValueError("pixel models have no empty label; set `guidance_scale: 1`")
        if self.family == "pixel" and self.tiny_decoder is not None:
            raise ValueError("pixel models have no VAE to replace; leave `tiny_decoder` out")
        if self.enhance is not None:
            self._check_enhancer(self.enhance)
        if self.family == "flux2" and self.tiny_decoder is not None:
            raise ValueError("`tiny_decoder` does not know the batch norm of FLUX.2's own VAE")
        return self

    def _check_enhancer(self, enhance: EnhanceConfig) -> None:
        if self.guidance_scale <= 1:
            raise ValueError("`enhance` strengthens guidance, and this model takes none")
        families = ("sd3", "flux")
        if (enhance.name == "reflect") != (self.family in families):
            other = "reflect" if self.family in families else "zigzag or weak_to_strong"
            if self.family in ("flux2", "z_image"):
                raise ValueError(f"`enhance` does not know family {self.family}; leave it out")
            raise ValueError(
                f"`enhance.name: {enhance.name}` is not of {self.family}; take {other}"
            )
        if enhance.weak_lora is not None and (enhance.name != "weak_to_strong" or not self.lora):
            raise ValueError("`enhance.weak_lora` is for weak_to_strong, with weights in `lora`")
        if enhance.name != "reflect" and self.scheduler not in (None, "ddim"):
            remedy = f"`enhance` inverts DDIM's steps, not those of {self.scheduler}"
            raise ValueError(f"{remedy}; set `scheduler: ddim`")

    def guided(self, call: int, calls: int) -> bool:
        """Whether a network call is guided: with and without the condition, two rows per image.

        Args:
            call: index of the call among the `calls` of one sampling.
        """
        start, stop = self.guidance_interval
        return self.guidance_scale > 1 and start <= call / calls < stop

    def enhances(self, call: int, calls: int) -> bool:
        """Whether a step of a sampling is enhanced."""
        return self.enhance is not None and self.enhance.enhances(call, calls)

    @property
    def weak(self) -> "GeneratorConfig | None":
        """The weaker model of the steps back; None if it is the model itself."""
        if self.enhance is None or (factor := self.enhance.weak_lora) is None:
            return None
        loras = [lora.model_copy(update={"scale": factor * lora.scale}) for lora in self.lora]
        return self.model_copy(update={"lora": tuple(loras)})

    @property
    def two_rows(self) -> bool:
        """Whether guidance takes a second row per image; FLUX takes the scale as an input."""
        return self.family != "flux"

    @property
    def templates(self) -> tuple[str, ...]:
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt


EVEN_SHARE = 0.25


class PairsConfig(Settings):
    """Which sets of classes (pairs, unless mixing.classes is larger) are mixed."""

    kind: Literal["all", "sampled", "named", "similar", "confused"] = Field(
        "all",
        description="all; sampled: `count` drawn uniformly; named: those in `names`; similar: "
        "`count` drawn by the similarity of their CLIP prototypes; confused: all, the more series "
        "the more the classifiers of `run` confuse the two classes",
    )
    count: int | None = Field(None, ge=1, description="how many, for sampled and similar")
    names: tuple[tuple[str, ...], ...] = Field(
        (), description="for named: lists of class names, as [[cat, dog], [cat, fox]]"
    )
    temperature: float = Field(
        0.05,
        gt=0,
        description="for similar: pairs are drawn by exp(cosine / temperature), without repeats",
    )
    run: str | None = Field(
        None,
        description="for confused: folder of a finished run whose `real.set_aside_per_class` "
        "images it judges",
    )
    by: PairWeighting = Field(
        "confusion",
        description="for confused: confusion: mean probability of one class on images of the "
        "other; calibration: confidence above accuracy between the two",
    )
    even: float = Field(
        EVEN_SHARE,
        ge=0,
        le=1,
        description="for confused: share of the series spread evenly over pairs",
    )

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        if (self.count is not None) != (self.kind in ("sampled", "similar")):
            raise ValueError("`count` belongs to kind sampled or similar, and only to them")
        if bool(self.names) != (self.kind == "named"):
            raise ValueError("`names` belongs to kind named, and only to it")
        if (self.run is not None) != (self.kind == "confused"):
            raise ValueError("`run` belongs to kind confused, and only to it")
        return self


class MixingConfig(Settings):
    """The series of a build."""

    classes: int = Field(
        2, ge=2, le=6, description="classes mixed in a series; 3 or more fill a simplex"
    )
    pairs: PairsConfig = PairsConfig()
    alphas: int | tuple[float, ...] = Field(
        8, description="images per series; or the weights of the first class themselves"
    )
    grid: Literal["even", "interior", "random"] = Field(
        "even",
        description="spacing of a count of alphas: even on [0, 1], denser in the middle, or random "
        "points of each series; all keep the end points",
    )
    groups_per_pair: int = Field(
        ge=1,
        description="series per unordered pair of classes, each from another noise; for confused "
        "pairs their mean",
    )
    interpolation: Literal["linear", "spherical"] = Field(
        "linear", description="path between the conditionings"
    )
    seed: int = Field(0, ge=0, description="seed of all initial noises")

    @field_validator("alphas")
    @classmethod
    def _lie_in_range(cls, alphas: int | tuple[float, ...]) -> int | tuple[float, ...]:
        if isinstance(alphas, int):
            if not 2 <= alphas <= 100:
                raise ValueError("give 2 to 100 images per series")
            return alphas
        if not 2 <= len(alphas) <= 100:
            raise ValueError("give 2 to 100 alphas")
        for alpha in alphas:
            if not 0 <= alpha <= 1:
                raise ValueError(f"{alpha} must lie in [0, 1]; 1 is the first class")
        return alphas

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not isinstance(self.alphas, int) and self.grid != "even":
            raise ValueError(f"`grid: {self.grid}` wants a count of alphas, not the alphas")
        if self.classes == 2:
            return self
        if not isinstance(self.alphas, int) or self.grid != "random":
            raise ValueError("mixing 3 or more classes wants a count of alphas and `grid: random`")
        if self.alphas < self.classes:
            raise ValueError(f"`alphas` must be at least {self.classes}: each class comes pure")
        if self.interpolation != "linear" or self.pairs.kind in ("similar", "confused"):
            remedy = "spherical paths, similar and confused pairs are defined for 2 classes only"
            raise ValueError(remedy)
        return self

    @property
    def images(self) -> int:
        """Images in a series."""
        return self.alphas if isinstance(self.alphas, int) else len(self.alphas)


class NoiseConfig(Settings):
    """Noise selection by stability under sampling and inversion (Qi et al., arXiv 2407.14041)."""

    strategy: Literal["random", "select", "optimise", "golden"] = Field(
        "random",
        description="random; select: the most stable of `candidates`; optimise: gradient descent "
        "from the most stable one; golden: changed by `network` to suit the middle of the series",
    )
    network: str | None = Field(
        None,
        description="for golden: safetensors file of a Golden Noise network",
        exclude_if=lambda value: value is None,
    )
    candidates: int = Field(8, ge=1, description="noises scored per series")
    steps: int = Field(
        10, ge=1, description="steps of sampling and of inversion; never more than generator.steps"
    )
    guidance_scale: float = Field(
        1.0, ge=0, description="guidance of both passes; at most 1 scores without guidance"
    )
    alphas: tuple[float, ...] = Field(
        (0.0, 0.5, 1.0), min_length=1, description="alphas at which noises are scored"
    )
    reduce: Literal["mean", "min"] = Field("mean", description="reduction of scores over alphas")
    halving: bool = Field(
        False,
        description="score all candidates with 7/10 of the steps at the middle alpha, and "
        "only the best quarter in full",
    )
    iterations: int = Field(100, ge=1, description="gradient steps of strategy optimise")
    learning_rate: float = Field(
        100.0, gt=0, description="of strategy optimise, scaled by the noise's norm / 256"
    )
    momentum: float = Field(0.5, ge=0, lt=1, description="of strategy optimise")
    detach_target: bool = Field(
        False, description="optimise towards the inverted noise as a constant: cheaper"
    )
    max_cost: float = Field(
        2.0, gt=0, description="greatest cost, as a multiple of the cost of generating"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for alpha in self.alphas:
            if not 0 <= alpha <= 1:
                raise ValueError(f"`alphas`: {alpha} must lie in [0, 1]; 1 is the first class")
        if (self.network is not None) != (self.strategy == "golden"):
            raise ValueError("`network` belongs to strategy golden, and only to it")
        return self


class EncoderConfig(Settings):
    """One CLIP model."""

    model: str = Field(description=CLIP_MODEL)
    pretrained: str | None = Field(
        None,
        description="open_clip weights tag, or a safetensors file; none for local-dir: and hf-hub: "
        "models",
    )
    revision: str | None = Field(
        None, description="commit of a hf-hub: model, 40 hexadecimal digits; none for others"
    )


NEARLY_HARD = 0.99  # label of an average real image


class AnnotationConfig(EncoderConfig):
    """How images get their soft labels."""

    model: str = Field("ViT-B-32-quickgelu", description=CLIP_MODEL)
    rule: Literal["projection", "simplex", "similarity", "mixing_ratio"] = Field(
        "projection",
        description="projection: of the CLIP feature on the line between two prototypes, then "
        "sharpened; simplex: on the simplex of all prototypes of the series, as it is; "
        "similarity: share of the similarity to the prototypes of all classes of the data; "
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


def implied_label(scale: float) -> float:
    """Probability of its class that an average real image, of weight 1, gets by a sharpening."""
    return 1 / (1 + math.exp(-scale / 2))


def hard_label_notes(scale: float) -> list[str]:
    """One note if this sharpening makes labels nearly hard, otherwise none."""
    label = implied_label(scale)
    if label <= NEARLY_HARD:
        return []
    return [
        f"annotation.scale {scale:.3g} gives an average real image the label {label:.5f}: such "
        "labels are nearly hard, which cost accuracy in docs/studies; CSM takes 2.3 or 4"
    ]


class ShardConfig(Settings):
    """How groups are batched and stored."""

    groups_per_shard: int | None = Field(
        None,
        ge=1,
        le=MAX_SERIES,
        description="groups in one tar; aim at 1 to 5 minutes of work, a kill loses one; none "
        "gives 8 to 16 shards of whole batches, more from a thousand groups on",
    )
    groups_per_batch: int = Field(
        8, ge=1, description="groups per forward pass; part of the identity, it changes last bits"
    )
    image_format: ImageFormat = Field(
        "webp", description="webp and png are lossless; jpg moves labels"
    )
    mark: bool = Field(
        True,
        description="say in each image file, by XMP metadata of some 420 bytes, that a model made "
        "it; changes no pixel",
    )
    max_left_out: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="share of a shard's series that may be left out because they are flat or "
        "not finite, at least one; more fail the shard; 0: none may",
    )
    store_size: int | None = Field(
        None, ge=8, description="side of the stored images in pixels; none keeps the model's"
    )

    def size(self, groups: int) -> int:
        """Groups per shard in a plan of `groups`: as configured, or derived."""
        if self.groups_per_shard is not None:
            return self.groups_per_shard
        batch = self.groups_per_batch  # a shard's last batch is padded: whole batches waste nothing
        batches = min(-(-groups // (MAX_SHARDS_OF_SMALL_PLAN * batch)), MAX_DERIVED_SIZE // batch)
        return max(1, batches) * batch


class BuildConfig(Settings):
    """A mixed dataset: equal configs make equal shards on equal hardware and versions."""

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
        return self
