"""StudyConfig: methods x datasets x seeds over one base training configuration."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from calib.config.train import Seeds
from data.settings import Settings

PostHoc = Literal["scaled", "vector", "isotonic"]
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")  # no dots, so that --set reaches inside


class DatasetConfig(Settings):
    """One dataset: what differs from `base` for every method."""

    overrides: dict[str, Any] = Field({}, description="settings of a training run, as in `base`")


class MethodConfig(Settings):
    """One method: what differs from `base`, and what its results are called."""

    name: str | None = Field(None, min_length=1, description="in tables; none: as its key")
    mixed: bool = Field(
        False, description="trains on the dataset's mixed images beside the real ones"
    )
    overrides: dict[str, Any] = Field({}, description="settings of a training run, as in `base`")
    on: dict[str, dict[str, Any]] = Field(
        {}, description="further settings on one dataset, by its key"
    )
    post_hoc: dict[str, PostHoc] = Field(
        {},
        description="further rows of the same runs, by name: scaled (by a temperature), vector"
        " or isotonic, each fitted on validation images",
    )


class StudyConfig(Settings):
    """A grid of training runs and the table that compares them.

    A cell's settings are `base`, then those of its dataset, then those of its method, then those
    of its method on that dataset. Keys are nested, or dotted names; of a loss, model or method
    of another name nothing stays.
    """

    name: str = Field(min_length=1, description="title of the tables")
    description: str = Field("", description="printed above the tables")
    base: dict[str, Any] = Field(
        description="a training run without name and seeds: `semix config train`"
    )
    datasets: dict[str, DatasetConfig] = Field(
        min_length=1, description="by key, which is also the folder"
    )
    methods: dict[str, MethodConfig] = Field(
        min_length=1, description="by key, which is also the folder"
    )
    baseline: str = Field(description="key of the method that the others are tested against")
    seeds: Seeds = Field((0, 1, 2), description="of every cell")

    @field_validator("datasets", "methods")
    @classmethod
    def _are_folders(cls, keyed: dict[str, Any]) -> dict[str, Any]:
        for key in keyed:
            if not FOLDER.fullmatch(key):
                raise ValueError(f"{key!r} is a folder: letters, digits, _, - and + alone")
        if len({key.lower() for key in keyed}) != len(keyed):  # one folder on some systems
            raise ValueError("two keys differ in upper and lower case alone")
        return keyed
