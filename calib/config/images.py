"""What is trained on beside the real images as they are: mixed images, random changes."""

from typing import Literal

from pydantic import Field

from data.exclusion import Exclusion
from data.settings import Settings


class MixedConfig(Settings):
    """The mixed images beside the real ones."""

    url: str = Field(description="root of a mixed dataset")
    index: str | None = Field(
        None, description="index/N.json to train on; none pins the newest when the run starts"
    )
    weight: float = Field(1.0, ge=0, description="of the mixed loss; the real loss has weight 1")
    loss: str = Field("l2", description="l2: squared error of probabilities; or soft_ce")
    per_real: float = Field(
        2.0, gt=0, le=16, description="mixed images a real one; 2 are CSM's: an end, an inner one"
    )
    batch_norm: Literal["shared", "eval_on_mixed", "separate"] = Field(
        "shared",
        description="statistics of batch norms: of both passes, of real images alone, or of each",
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
