"""The settings of a loop."""

from collections.abc import Mapping
from itertools import product
from typing import Self

from pydantic import Field, model_validator

from semix.calib.config import Seeds, TrainConfig
from semix.calib.study import Overrides, error_prefix, merged
from semix.data.errors import InputError
from semix.data.formats import PairWeighting
from semix.data.settings import Settings, load_settings
from semix.data.splits import RealDataConfig
from semix.pipeline.config import EVEN_SHARE, BuildConfig


class LoopConfig(Settings):
    """A build, a training run, and what each round adds.

    Round 0 builds evenly and trains. Each further round adds series where the classifiers of the
    round before confuse classes, and trains anew on all of them. Beside it, as many series are
    added evenly, and trained on with the same settings.
    """

    name: str = Field(min_length=1, description="title of the page")
    real: RealDataConfig = Field(description="of the build and of all runs; sets images aside")
    build: Overrides = Field(description="a build without `real`: `semix config build`")
    train: Overrides = Field(
        description="a training run without name, `real` and `mixed.url`: `semix config train`"
    )
    series_per_pair: int = Field(
        ge=1, description="series that a round adds, a mean over pairs of classes"
    )
    by: PairWeighting = Field("confusion", description="as `mixing.pairs.by` of a build")
    even: float = Field(EVEN_SHARE, ge=0, le=1, description="as `mixing.pairs.even` of a build")
    standins: bool = Field(
        False, description="train a small generator and a small CLIP on the training images"
    )
    splits: Seeds | None = Field(
        None, description="split seeds of the real images, each a replicate; none: as in `real`"
    )
    draws: Seeds | None = Field(
        None, description="seeds of the series, each a replicate of each split; none: as in `build`"
    )

    @model_validator(mode="after")
    def _can_choose_pairs(self) -> Self:
        if self.real.set_aside_per_class is None:
            raise ValueError("`real.set_aside_per_class` is needed: pairs are weighted by them")
        for section, key in (("build", "real"), ("train", "real"), ("train", "name")):
            if key in getattr(self, section):
                raise ValueError(f"`{section}.{key}`: leave it out; `{key}` of the loop is taken")
        return self

    def replicates(self) -> list[tuple[int | None, int | None, "LoopConfig"]]:
        """Split, draw and settings of each replicate; None where the loop names no seeds."""
        replicates = []
        for split, draw in product(self.splits or (None,), self.draws or (None,)):
            real = {} if split is None else {"split_seed": split}
            series = {} if draw is None else {"mixing.seed": draw}
            changes = {
                "real": self.real.model_copy(update=real),
                "build": merged(self.build, series),
                "splits": None,
                "draws": None,
            }
            replicates.append((split, draw, self.model_copy(update=changes)))
        return replicates

    def build_config(self, models: Mapping[str, str] | None = None) -> BuildConfig:
        """The settings of the build of round 0.

        Args:
            models: settings of models that were trained, as `generator.model`.
        Raises:
            InputError: settings that no build accepts, or pairs that a loop cannot extend.
        """
        values = merged(self.build, {"real": self.real.model_dump(mode="json"), **(models or {})})
        if self.standins and models is None:  # filled in when they are trained
            values = merged(values, {"generator.model": "", "annotation.model": ""})
        with error_prefix("build"):
            config = load_settings(BuildConfig, values)
            if config.mixing.classes != 2 or config.mixing.pairs.kind != "all":
                kind = config.mixing.pairs.kind if config.mixing.classes == 2 else "of 3 or more"
                raise InputError("mixing.pairs", kind, "a loop begins with all pairs; leave it out")
        return config

    def train_config(self, name: str, url: str) -> TrainConfig:
        """The settings of one run. Raises InputError for settings that no run accepts."""
        values = {"real": self.real.model_dump(mode="json"), "name": name}
        with error_prefix("train"):
            return load_settings(TrainConfig, merged(self.train, {**values, "mixed.url": url}))
