"""TrainConfig: everything that decides what a training run does."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from calib.config.evaluation import EvaluationConfig
from calib.config.head import HeadConfig
from calib.config.images import AugmentConfig, MixedConfig
from calib.config.optimiser import OptimiserConfig
from calib.config.parts import LOSSES, METHODS, MODELS, PartConfig, told
from data.settings import Settings
from data.splits import RealDataConfig

# Of a seed's validation logits: which of them decides when to stop or what to keep.
Criterion = Literal["accuracy", "nll", "ece", "adaptive_ece", "classwise_ece", "brier"]

# They decide which seeds are trained, what they are called, what is shown and measured and where
# images are kept, not what a seed becomes.
OUTSIDE_IDENTITY: dict[str, Any] = {
    "name": True,
    "seeds": True,
    "checkpoint_every": True,
    "trackers": True,
    "evaluation": True,
    "mixed": {"memory_gib": True, "cache_gib": True},
}


def _are_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) != len(seeds):
        raise ValueError("give each seed once")
    if min(seeds) < 0:
        raise ValueError("seeds are 0 or more")
    return seeds


Seeds = Annotated[tuple[int, ...], Field(min_length=1), AfterValidator(_are_seeds)]


class EarlyStopConfig(Settings):
    """End stage one when validation has not improved for a while."""

    measure: Criterion = Field("nll", description="of the validation images, after each epoch")
    patience: int = Field(10, ge=1, description="epochs without an improvement")


class TrainConfig(Settings):
    """One method on one dataset, for several seeds."""

    name: str = Field(min_length=1, description="of the method in tables")
    real: RealDataConfig = Field(description="labelled pictures")
    mixed: MixedConfig | None = Field(None, description="mixed dataset; none trains on real only")
    loss: PartConfig = Field(
        PartConfig(name="ce"), description="on real images", json_schema_extra=told(LOSSES)
    )
    method: PartConfig = Field(
        PartConfig(name="plain"),
        description="what becomes of real images before the loss",
        json_schema_extra=told(METHODS),
    )
    model: PartConfig = Field(description="the classifier", json_schema_extra=told(MODELS))
    epochs: int = Field(200, ge=1, description="passes over the real training images")
    batch_size: int = Field(128, ge=2, description="real images a step, over all processes")
    accumulate: int = Field(
        1, ge=1, description="parts that a step's batch is run in, where it does not fit at once"
    )
    augment: AugmentConfig = Field(AugmentConfig(), description="of training images")
    optimiser: OptimiserConfig = Field(OptimiserConfig(), description="of the classifier")
    select: Literal["last"] | Criterion = Field(
        "last", description="which epoch's weights to keep: the last, or the best on validation"
    )
    early_stop: EarlyStopConfig | None = Field(None, description="none trains all epochs")
    ema: float | None = Field(
        None, gt=0, lt=1, description="decay a step of averaged weights, which are then measured"
    )
    compile: bool = Field(False, description="of the network, by torch.compile")
    mixed_precision: Literal["no", "bf16", "fp16"] = Field(
        "no",
        description="of the network; losses are always float32; no: float32, on a GPU with TF32 "
        "convolutions as torch has them",
    )
    head: HeadConfig | None = Field(None, description="stage two; none trains no second head")
    seeds: Seeds = Field((0,), description="each trains a model of its own, one after the other")
    checkpoint_every: int = Field(10, ge=1, description="epochs between checkpoints")
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        ("tensorboard",), description="that get the figures of every epoch; history.jsonl always"
    )
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="what is measured")

    def identity(self) -> dict[str, Any]:
        """What decides the result of a seed, as plain values."""
        return self.model_dump(mode="json", exclude=OUTSIDE_IDENTITY)
