"""What is examined: this machine, and for what it is to be used."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from data.errors import InputError
from data.real import RealDataConfig
from data.settings import Settings, load_settings

if TYPE_CHECKING:
    from calib.config import TrainConfig
    from flows.server.probe import ServerFacts
    from pipeline.config import BuildConfig

PRECISION = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Subject:
    """This machine for a build, a training run or neither.

    Attributes:
        out: a place to write to; empty for none.
    """

    build: "BuildConfig | None" = None
    train: "TrainConfig | None" = None
    out: str = ""

    @property
    def real(self) -> RealDataConfig | None:
        config = self.build or self.train
        return config.real if config else None

    @property
    def dtype(self) -> str:
        """In which the networks run."""
        if self.build:
            return self.build.generator.dtype
        return PRECISION[self.train.mixed_precision] if self.train else "float32"

    @cached_property
    def server(self) -> "ServerFacts | None":
        """What the configured Prefect server says; None without one."""
        from prefect.settings import PREFECT_API_URL

        from flows.server.probe import probe

        url = PREFECT_API_URL.value()
        return probe(url) if url else None


class _Raw(Settings):
    """Any settings, to see which they are."""

    model_config = ConfigDict(extra="allow", frozen=True)


def subject_of(config: str, overrides: Sequence[str], out: str) -> Subject:
    """Recognise settings by their sections.

    Raises:
        InputError: they cannot be read, or are neither a build's nor a training run's.
    """
    if not config:
        if overrides:
            raise InputError("--set", overrides[0], "changes a config; give one")
        return Subject(out=out)
    sections = set(load_settings(_Raw, config, overrides).model_extra or ())
    if "generator" in sections:
        from pipeline.config import BuildConfig

        return Subject(build=load_settings(BuildConfig, config, overrides), out=out)
    if "model" in sections:
        from calib.config import TrainConfig

        return Subject(train=load_settings(TrainConfig, config, overrides), out=out)
    remedy = "has neither the section `generator` of a build nor `model` of a training run"
    raise InputError("config", config, remedy)
