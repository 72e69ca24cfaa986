"""TrainConfig: everything that decides what a training run does."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from data.errors import InputError
from data.exclusion import Exclusion
from data.label_sets import LabelSet
from data.real import RealDataConfig, class_names
from data.root import Root
from data.settings import Settings

# They decide which seeds are trained, what they are called and where images are kept, not what
# a seed becomes.
OUTSIDE_IDENTITY: dict[str, Any] = {
    "name": True,
    "seeds": True,
    "checkpoint_every": True,
    "mixed": {"memory_gib": True, "cache_gib": True},
}


class PartConfig(Settings):
    """A loss or a model by name; every other key is one of its own parameters."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="see `calib.losses` and `calib.models`")

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class MixedConfig(Settings):
    """The mixed images beside the real ones."""

    url: str = Field(description="root of a mixed dataset")
    index: str | None = Field(
        None, description="index/N.json to train on; none pins the newest when the run starts"
    )
    weight: float = Field(1.0, ge=0, description="of the mixed loss; the real loss has weight 1")
    loss: str = Field("l2", description="l2: squared error of probabilities; or soft_ce")
    class_matched: bool = Field(
        True, description="each real image draws a group of its own class, as CSM does"
    )
    scale: float | None = Field(
        None, gt=0, description="sharpen the stored weights anew; none takes the stored labels"
    )
    labels: str | None = Field(
        None, description="digest of a label set; none takes the labels in the shards"
    )
    exclude: Exclusion | None = Field(None, description="rules for series to leave out")
    memory_gib: float = Field(
        8.0,
        ge=0,
        description="decode images once into memory if they fit; else they are read when drawn",
    )
    cache_gib: float = Field(
        50.0, ge=0, description="copies of shards on this machine, of a root that is not local"
    )


class AugmentConfig(Settings):
    """Random changes of training images, real and mixed alike."""

    shift: int = Field(4, ge=0, description="largest shift on each axis, pixels; the rest is black")
    flip: bool = Field(False, description="mirror half of the images; wrong for digits")


class OptimiserConfig(Settings):
    """How weights follow gradients; the defaults are those of the papers."""

    name: Literal["sgd", "adamw"] = Field("sgd", description="optimiser")
    learning_rate: float = Field(0.1, gt=0, description="at its highest")
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd; adamw has betas 0.9 and 0.999")
    weight_decay: float = Field(5e-4, ge=0, description="on all weights")
    schedule: Literal["multistep", "cosine", "constant"] = Field(
        "multistep", description="of the learning rate; cosine falls to 0 with every step"
    )
    milestones: tuple[int, ...] = Field(
        (80, 120), description="multistep: epochs after which the learning rate falls"
    )
    factor: float = Field(0.1, gt=0, le=1, description="multistep: what it is multiplied with")
    warmup_steps: int = Field(0, ge=0, description="steps in which the learning rate rises from 0")
    clip_norm: float | None = Field(
        2.0, gt=0, description="largest norm of the model's gradient; none does not clip"
    )


class HeadConfig(Settings):
    """Stage two, MaC-Cal: a masked head on the frozen backbone, from real images alone."""

    epochs: int = Field(40, ge=1, description="passes over the real training images")
    batch_size: int = Field(128, ge=2, description="images a step, over all processes")
    optimiser: OptimiserConfig = Field(
        OptimiserConfig(schedule="constant"), description="of the head"
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

    def head_params(self) -> dict[str, Any]:
        """What `MaskedBottleneckHead` takes."""
        return self.model_dump(include={"hidden", "mask_mode", "inference", "allow_unscaled"})

    def controller_params(self) -> dict[str, Any]:
        """What `SparsityController` takes, besides what stage one found."""
        return self.model_dump(
            include={"epochs", "p_start", "p_min", "gamma", "delta_max", "delta_min"}
        )


class TrainConfig(Settings):
    """One method on one dataset, for several seeds."""

    name: str = Field(min_length=1, description="of the method in tables")
    real: RealDataConfig = Field(description="labelled pictures")
    mixed: MixedConfig | None = Field(None, description="mixed dataset; none trains on real only")
    loss: PartConfig = Field(PartConfig(name="ce"), description="on real images")
    model: PartConfig = Field(description="the classifier")
    epochs: int = Field(200, ge=1, description="passes over the real training images")
    batch_size: int = Field(128, ge=2, description="real images a step, over all processes")
    augment: AugmentConfig = Field(AugmentConfig(), description="of training images")
    optimiser: OptimiserConfig = Field(OptimiserConfig(), description="of the classifier")
    select: Literal["last", "best_accuracy"] = Field(
        "last", description="which epoch's weights to keep; the accuracy is that on validation"
    )
    mixed_precision: Literal["no", "bf16", "fp16"] = Field(
        "no", description="of the network; losses are always float32"
    )
    head: HeadConfig | None = Field(None, description="stage two; none trains no masked head")
    seeds: tuple[int, ...] = Field(
        (0,), min_length=1, description="each trains a model of its own, one after the other"
    )
    checkpoint_every: int = Field(10, ge=1, description="epochs between checkpoints")

    @field_validator("seeds")
    @classmethod
    def _are_different(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("give each seed once")
        if min(seeds) < 0:
            raise ValueError("seeds are 0 or more")
        return seeds

    def identity(self) -> dict[str, Any]:
        """What decides the result of a seed, as plain values."""
        return self.model_dump(mode="json", exclude=OUTSIDE_IDENTITY)


def check(config: TrainConfig) -> None:
    """Find what cannot be trained before an image is read or a file is written.

    Raises:
        InputError: an unknown loss, model or parameter; a value that a part refuses; a mixed
            dataset that is not there, not finished, or of other classes, or has no such labels.
    """
    names = class_names(config.real)
    if config.augment.flip and config.real.name == "digits":
        raise InputError("augment.flip", True, "a mirrored digit is no digit; switch it off")
    if config.augment.shift >= config.real.image_size:
        raise InputError("augment.shift", config.augment.shift, "stay below real.image_size")
    _check_parts(config, len(names))
    if config.mixed is not None:
        _check_mixed(config.mixed, names)


def _check_parts(config: TrainConfig, num_classes: int) -> None:
    import torch

    from calib.heads import MaskedBottleneckHead, SparsityController
    from calib.losses import build_loss, build_mixed_loss
    from calib.models import build_model

    if config.mixed is not None:
        build_mixed_loss(config.mixed.loss)
    with torch.device("meta"):  # shapes only: even a large model costs nothing
        build_loss(config.loss.name, num_classes, **config.loss.params)
        model = build_model(config.model.name, num_classes, **config.model.params)
        if config.head is not None:
            MaskedBottleneckHead(model.num_features, num_classes, **config.head.head_params())
    if config.head is not None:
        SparsityController(base_accuracy=1.0, **config.head.controller_params())


def _check_mixed(config: MixedConfig, names: tuple[str, ...]) -> None:
    try:
        root = Root(config.url)
        if config.labels is not None:
            LabelSet(root, config.labels)
    except InputError as error:
        raise InputError(f"mixed.{error.field}", error.value, error.remedy) from None
    found = tuple(root.plan["class_names"])
    if found != names:
        remedy = f"its classes are {', '.join(found)}; the real data's are {', '.join(names)}"
        raise InputError("mixed.url", config.url, remedy)
    if not root.indices():
        raise InputError("mixed.url", config.url, "is not finished; run `semix resume` first")
    if config.index is not None and not root.store.exists(config.index):
        raise InputError("mixed.index", config.index, f"is not in {config.url}")
