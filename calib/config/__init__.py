"""The settings of a training run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from semix.calib.calibrators import STANDARD, CalibratorName
from semix.calib.config.loss import CrossEntropyConfig, LossConfig, MixedLossName
from semix.calib.config.method import MethodConfig, PlainConfig
from semix.calib.config.model import (
    IMAGENET_STEM,
    IMAGENET_STEM_MIN_SIDE,
    SMALL_STEM,
    ModelConfig,
    ResNetConfig,
)
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.settings import Settings, one_of
from semix.data.splits import RealDataConfig

MIN_IMAGES_PER_PROCESS = 2  # real ones, and mixed ones: batch norms compute a variance


class OptimiserConfig(Settings):
    """Optimiser and learning rate; the defaults are those of the papers."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="optimiser")
    learning_rate: float = Field(0.1, gt=0, description="peak learning rate")
    momentum: float = Field(
        0.9, ge=0, lt=1, description="of sgd; the others have betas 0.9 and 0.999"
    )
    weight_decay: float = Field(5e-4, ge=0, description="on all weights")
    schedule: Literal["multistep", "cosine", "constant"] = Field(
        "multistep", description="of the learning rate; cosine falls to 0 with every step"
    )
    milestones: tuple[int, ...] = Field(
        (80, 120), description="multistep: epochs after which the learning rate falls"
    )
    factor: float = Field(0.1, gt=0, le=1, description="multistep: factor of each fall")
    warmup_steps: int = Field(0, ge=0, description="steps in which the learning rate rises from 0")
    clip_norm: float | None = Field(
        2.0, gt=0, description="largest norm of the model's gradient; none does not clip"
    )


ControlName = Literal["end_points", "interior", "shuffled_labels", "pixel_mixup"]


class ChoiceConfig(Settings):
    """Which series to train on, by what another run's classifiers say of their images."""

    run: str = Field(description="folder of a finished run on the same classes and image size")
    by: Literal["uncertainty", "disagreement", "boundary"] = Field(
        "uncertainty",
        description="entropy of its probabilities; their distance to the soft label; or how close "
        "the two largest are",
    )
    share: float = Field(
        0.5, gt=0, le=1, description="of the series of each pair of classes, those that score most"
    )


class MixedConfig(Settings):
    """The mixed images beside the real ones."""

    url: str = Field(description="root of a mixed dataset")
    index: str | None = Field(
        None, description="index/N.json to train on; none pins the newest when the run starts"
    )
    weight: float = Field(1.0, ge=0, description="of the mixed loss; the real loss has weight 1")
    loss: MixedLossName = Field(
        "l2", description="squared error of probabilities, or cross-entropy with soft labels"
    )
    per_real: float = Field(
        2.0,
        gt=0,
        le=16,
        description="mixed images per real image; CSM: 2, an end point and an inner image",
    )
    batch_norm: Literal["shared", "eval_on_mixed", "separate"] = Field(
        "shared",
        description="statistics of batch norms: of both passes, of real images only, or of each",
    )
    class_matched: bool = Field(
        True, description="each real image draws a group of its own class, as CSM does"
    )
    scale: float | None = Field(
        None, gt=0, description="sharpen the stored weights anew; none takes the stored labels"
    )
    labels: str | None = Field(
        None, description="digest of a label set; none takes the labels in the shards"
    )
    rule: Literal["stored", "mixing_ratio"] = Field(
        "stored",
        description="the stored labels, as `labels` and `scale` choose them; or, as an ablation, "
        "the conditioning weights",
    )
    exclude: Exclusion | None = Field(None, description="rules for series to leave out")
    # Not stored where they are unused, so that they change the identity of no other run.
    choose: ChoiceConfig | None = Field(
        None,
        description="train on some of the series, by what another run says of their images",
        exclude_if=lambda value: value is None,
    )
    control: ControlName | None = Field(
        None,
        description="as an ablation: only end points with hard labels, only interior images, "
        "labels of other images, or the end points' means in pixels instead of interior images",
        exclude_if=lambda value: value is None,
    )
    labels_as: Literal["soft", "sampled"] = Field(
        "soft",
        description="the soft labels; or, as an ablation, each time an image is drawn a class "
        "sampled from its soft label, as a hard label",
        exclude_if=lambda value: value == "soft",
    )
    memory_gib: float = Field(
        8.0,
        ge=0,
        description="decode images once into memory if they fit; else read them when drawn",
    )
    cache_gib: float = Field(
        50.0, ge=0, description="copies of shards on this machine, of a root that is not local"
    )

    @model_validator(mode="after")
    def _check_label_source(self) -> Self:
        for name in ("scale", "labels"):
            if self.rule != "stored" and getattr(self, name) is not None:
                raise ValueError(f"`rule: {self.rule}` takes no stored labels; leave `{name}` out")
        return self


class OODDataConfig(RealDataConfig):
    """Labelled out-of-distribution images: no test image shows one of the run's classes."""

    grey: bool = Field(False, description="convert to grey, to compare with grey test images")


class AugmentConfig(Settings):
    """Random changes of the training images, the same for real and mixed ones."""

    shift: int = Field(4, ge=0, description="largest shift on each axis, pixels; the rest is black")
    flip: bool = Field(False, description="mirror half of the images; wrong for digits")


# Batch size and learning rate of second stages in the paper, where 45,000 images make some 352
# steps per epoch. Of a small training set an epoch has only a few steps. The masks of an epoch then
# remove more than the head learns in it, and the head ends several points of accuracy below the
# network. So the batch size is halved until an epoch has enough steps, and the learning rate is
# halved with it (linear scaling, Goyal et al. 2017).
HEAD_BATCH_SIZE, HEAD_LEARNING_RATE = 128, 0.1
HEAD_MIN_STEPS, HEAD_MIN_BATCH_SIZE = 128, 4


class HeadOptimiserConfig(OptimiserConfig):
    """As for the classifier, but with a constant learning rate."""

    # Optional here, unlike in the base class: the batch size may determine it.
    learning_rate: float | None = Field(  # type: ignore[assignment]
        None,
        gt=0,
        description=f"peak learning rate; none: {HEAD_LEARNING_RATE:g}, times batch_size / "
        f"{HEAD_BATCH_SIZE} where batch_size is derived, too",
    )
    schedule: Literal["multistep", "cosine", "constant"] = Field(
        "constant", description="of the learning rate; cosine falls to 0 with every step"
    )


class TSTOptimiserConfig(HeadOptimiserConfig):
    """The optimiser of TST: Adam, with neither weight decay nor clipping."""

    name: Literal["sgd", "adam", "adamw"] = Field("adam", description="optimiser")
    learning_rate: float | None = Field(1e-4, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="on all weights")
    clip_norm: float | None = Field(
        None, gt=0, description="largest norm of the head's gradient; none does not clip"
    )


AUGMENT_DESCRIPTION = (
    "train on augmented images, as TST's code does; MaC-Cal's paper does not augment"
)


class SecondStageConfig(Settings):
    """Settings of every second stage: a head that is trained on features of the frozen network."""

    epochs: int = Field(40, ge=1, description="passes over the real training images")
    batch_size: int | None = Field(
        None,
        ge=2,
        description=f"images per step, over all processes; none: {HEAD_BATCH_SIZE}, halved down to "
        f"{HEAD_MIN_BATCH_SIZE} until the training images make {HEAD_MIN_STEPS} steps per epoch, "
        f"so {HEAD_BATCH_SIZE} from {HEAD_BATCH_SIZE * HEAD_MIN_STEPS:,} images on",
    )
    optimiser: HeadOptimiserConfig = Field(HeadOptimiserConfig(), description="of the head")
    views: int | None = Field(
        None,
        ge=1,
        description="augmented views per image, whose features are computed once and used in turn;"
        " none computes features anew each epoch, or once where nothing is augmented",
    )
    augment: bool = Field(True, description=AUGMENT_DESCRIPTION)
    reduction: Literal["mean", "sum"] = Field(
        "mean", description="of the loss over a step's images; the paper's base code sums"
    )

    def batch_size_for(self, images: int) -> int:
        """Images per step, for this number of training images."""
        if self.batch_size is not None:
            return self.batch_size
        size = HEAD_BATCH_SIZE
        while size > HEAD_MIN_BATCH_SIZE and images // size < HEAD_MIN_STEPS:
            size //= 2
        return size

    def optimiser_for(self, images: int) -> OptimiserConfig:
        """The optimiser with its learning rate, for this number of training images."""
        if self.optimiser.learning_rate is not None:
            return self.optimiser
        factor = (
            1.0 if self.batch_size is not None else self.batch_size_for(images) / HEAD_BATCH_SIZE
        )
        return self.optimiser.model_copy(update={"learning_rate": HEAD_LEARNING_RATE * factor})

    def augmentation(self, augment: AugmentConfig) -> AugmentConfig:
        """The augmentation of the images that the head is trained on."""
        return augment if self.augment else AugmentConfig(shift=0)


class MaCCalConfig(SecondStageConfig):
    """MaC-Cal: a bottleneck head whose weights are masked anew each epoch.

    Source: arXiv 2508.09116.
    """

    method: Literal["mac_cal"] = Field("mac_cal", description="mac_cal, tst or vtst")
    augment: bool = Field(False, description=AUGMENT_DESCRIPTION)
    loss: LossConfig = Field(CrossEntropyConfig(), description="on real images")
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
        True,
        description="take accuracy and confidence from a separate pass after each epoch; means"
        " over the steps of an epoch lag behind",
    )

    @model_validator(mode="after")
    def _check_inference(self) -> Self:
        if self.mask_mode == "reset" and self.inference != "last":
            raise ValueError(
                f"`inference` is {self.inference}: reset weights are already sparse; use last, or "
                "`mask_mode: preserve`"
            )
        if self.inference == "dense" and not self.allow_unscaled:
            raise ValueError(
                "`inference` is dense: weights trained under a mask and used without it are worse "
                "calibrated than no head; use last or expected, or set `allow_unscaled` for a "
                "comparison"
            )
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        for low, high in (("p_min", "p_start"), ("delta_min", "delta_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ValueError(f"`{low}` is {least:g}, above `{high}`, {most:g}")
        return self


class TSTConfig(SecondStageConfig):
    """TST: replace the linear head by a small network to a latent space and a linear layer.

    Source: Jordahn and Olmos 2024, arXiv 2405.01196.
    """

    method: Literal["tst", "vtst"] = Field("tst", description="vtst: a Gaussian latent space")
    optimiser: TSTOptimiserConfig = Field(TSTOptimiserConfig(), description="of the head")
    latent: int = Field(10, ge=1, description="width Z of the latent space")
    samples: int = Field(10, ge=1, description="vtst: latent draws averaged for a prediction")
    select: Literal["last", "nll"] = Field(
        "nll", description="which epoch's head to keep; nll is that on validation"
    )


HEADS = {"mac_cal": MaCCalConfig, "tst": TSTConfig, "vtst": TSTConfig}
if TYPE_CHECKING:
    HeadConfig = MaCCalConfig | TSTConfig
else:
    HeadConfig = one_of(HEADS, key="method", default="mac_cal")


class ShiftConfig(Settings):
    """Test images under common corruptions, which are computed when they are measured."""

    corruptions: Literal["standard", "all"] | tuple[str, ...] = Field(
        "standard", description="the 15 of the benchmark, all 19, or some by name"
    )
    severities: tuple[int, ...] = Field(
        (1, 2, 3, 4, 5), min_length=1, description="from 1, hardly seen, to 5"
    )
    bins: int = Field(15, ge=1, description="of the calibration errors under shift")
    images: int | None = Field(
        None, ge=1, description="of the test images, the first of a fixed shuffle; none: all"
    )
    calibrators: tuple[CalibratorName, ...] = Field(
        (), description="of `evaluation.calibrators`, beside temperature scaling"
    )


def _shift_from_bool(shift: Any) -> Any:
    """Replace true by the default settings and false by none."""
    return {True: {}, False: None}[shift] if isinstance(shift, bool) else shift


def _precision_from_bool(precision: Any) -> Any:
    """Replace false by "no": YAML reads an unquoted no as false."""
    return "no" if precision is False else precision


class EvaluationConfig(Settings):
    """What is measured on test images, on shifted and on out-of-distribution (OOD) images."""

    bins: int = Field(15, ge=1, description="of every binned measure")
    bootstrap: int = Field(
        1000, ge=0, description="resamples of the test images for 95 % intervals; 0 makes none"
    )
    calibrators: tuple[CalibratorName, ...] = Field(
        STANDARD,
        description="post-hoc calibrators beside temperature scaling, which is always fitted; "
        "scaled_mixed, fitted on validation and mixed images, only where a run has mixed images",
    )
    ensemble: bool = Field(
        False,
        description="also measure the mean of the seeds' probabilities, each after temperature "
        "scaling, as one classifier",
    )
    shift: Annotated[ShiftConfig | None, BeforeValidator(_shift_from_bool)] = Field(
        None, description="none measures no corrupted images; true: with these defaults"
    )
    ood: dict[str, OODDataConfig] = Field(
        {}, description="OOD datasets by name; their test images show none of the classes"
    )

    @model_validator(mode="after")
    def _check_shift_calibrators(self) -> Self:
        for name in self.shift.calibrators if self.shift else ():
            if name not in ("scaled", *self.calibrators):
                raise ValueError(f"`shift.calibrators` has {name}, `calibrators` has not; add it")
        return self


# Measures on validation images; one of them decides when to stop, or which epoch to select.
Criterion = Literal["accuracy", "nll", "ece", "adaptive_ece", "classwise_ece", "brier"]
# scaled_nll: the NLL after temperature scaling, which is what remains where one refines first and
# calibrates afterwards (Berta et al. 2025, arXiv 2501.19195).
EpochCriterion = Criterion | Literal["scaled_nll"]

# Settings that do not influence the trained weights of a seed: which seeds are trained, names, what
# is shown and measured, and where images are stored. True excludes a setting or a whole section.
SettingNames = Mapping[str, bool | Mapping[str, bool]]
NON_IDENTITY_SETTINGS: SettingNames = {
    "name": True,
    "seeds": True,
    "checkpoint_every": True,
    "trackers": True,
    "evaluation": True,
    "real": {"download": True},
    "real_memory_gib": True,
    "real_workers": True,
    "mixed": {"memory_gib": True, "cache_gib": True},
}


def _check_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) != len(seeds):
        raise ValueError("give each seed once")
    if min(seeds) < 0:
        raise ValueError("seeds are 0 or more")
    return seeds


Seeds = Annotated[tuple[int, ...], Field(min_length=1), AfterValidator(_check_seeds)]


class EarlyStopConfig(Settings):
    """End stage one when validation has not improved for a while."""

    measure: EpochCriterion = Field("nll", description="of the validation images, after each epoch")
    patience: int = Field(10, ge=1, description="epochs without an improvement")


class TrainConfig(Settings):
    """The training of one method on one dataset, with several seeds."""

    name: str = Field(min_length=1, description="of the method in tables")
    real: RealDataConfig = Field(description="labelled pictures")
    real_memory_gib: float = Field(
        8.0,
        ge=0,
        description="decode real images once, into memory and onto the GPU, if they fit; else read "
        "them when drawn",
    )
    real_workers: int | None = Field(
        None,
        ge=0,
        description="processes per trainer that read real images; none: as many as it has cores",
    )
    mixed: MixedConfig | None = Field(None, description="mixed dataset; none trains on real only")
    loss: LossConfig = Field(CrossEntropyConfig(), description="on real images")
    method: MethodConfig = Field(
        PlainConfig(),
        description="how real images are mixed or the classifier is changed in training",
    )
    model: ModelConfig = Field(
        description="the classifier; resnet18 to resnet152 take the ImageNet stem (a 7x7 "
        "convolution of stride 2, max pooling) where real.image_size is "
        f"{IMAGENET_STEM_MIN_SIDE} or more, else a 3x3 one; `stem: {SMALL_STEM}` or "
        f"`stem: {IMAGENET_STEM}` says otherwise",
    )
    epochs: int = Field(200, ge=1, description="passes over the real training images")
    batch_size: int = Field(128, ge=2, description="real images per step, over all processes")
    accumulate: int = Field(
        1, ge=1, description="micro-batches per step, where a batch does not fit at once"
    )
    augment: AugmentConfig = Field(AugmentConfig(), description="of training images")
    optimiser: OptimiserConfig = Field(OptimiserConfig(), description="of the classifier")
    select: Literal["last"] | EpochCriterion = Field(
        "last",
        description="which epoch's weights to keep: the last, or the best on validation; "
        "scaled_nll is the NLL after temperature scaling",
    )
    early_stop: EarlyStopConfig | None = Field(None, description="none trains all epochs")
    ema: float | None = Field(
        None, gt=0, lt=1, description="decay per step of averaged weights, which are then measured"
    )
    compile: bool = Field(False, description="compile the network with torch.compile")
    mixed_precision: Annotated[
        Literal["no", "bf16", "fp16"], BeforeValidator(_precision_from_bool)
    ] = Field(
        "no",
        description="of the network; losses are always float32; no: float32, on a GPU with TF32 "
        "convolutions as torch has them",
    )
    head: HeadConfig | None = Field(None, description="stage two; none trains no second head")
    seeds: Seeds = Field((0,), description="each trains one model, one after the other")
    checkpoint_every: int = Field(10, ge=1, description="epochs between checkpoints")
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        ("tensorboard",), description="get the figures of every epoch; history.jsonl has them, too"
    )
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="what is measured")

    @field_validator("model")
    @classmethod
    def _add_imagenet_stem(cls, model: ModelConfig, info: ValidationInfo) -> ModelConfig:
        """Add the ImageNet stem for large images to the settings, and so to their identity."""
        real = info.data.get("real")  # None if it is invalid
        if real is None or not isinstance(model, ResNetConfig) or "stem" in model.params:
            return model
        if real.image_size < IMAGENET_STEM_MIN_SIDE:
            return model
        return model.model_copy(update={"stem": IMAGENET_STEM})

    def identity(self) -> dict[str, object]:
        """The settings that influence the trained weights of a seed, as plain values."""
        return self.model_dump(mode="json", exclude=NON_IDENTITY_SETTINGS)


def check_accumulation(local_size: int, count: int) -> None:
    """Raise InputError unless a process's batch divides into `count` equal micro-batches.

    Args:
        local_size: number of real images in the batch of one process.
    """
    if local_size % count or (count > 1 and local_size // count < MIN_IMAGES_PER_PROCESS):
        problem = (
            f"the {local_size} real images of a process do not divide into {count} equal parts"
        )
        raise InputError(
            "accumulate", count, f"{problem} of {MIN_IMAGES_PER_PROCESS} images or more"
        )
