"""What is examined: this machine, and for what it is to be used."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from data.errors import InputError
from data.settings import load_settings
from data.splits import RealDataConfig
from flows.configs import NAMES, command_of, models

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


def subject_of(config: str, overrides: Sequence[str], out: str) -> Subject:
    """Recognise settings by their sections.

    Raises:
        InputError: they cannot be read, or are neither a build's nor a training run's.
    """
    if not config:
        if overrides:
            raise InputError("--set", overrides[0], "changes a config; give one")
        return Subject(out=out)
    command = command_of(config)
    if command not in ("build", "train"):
        what = f"is {NAMES[command]}" if command else "has not the sections of a config"
        raise InputError("config", config, f"{what}; give that of a build or of a training run")
    settings: Any = load_settings(models()[command], config, overrides)
    return Subject(out=out, **{command: settings})
