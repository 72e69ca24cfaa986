"""The cells of a study: one dataset, one method, all seeds; each an ordinary training run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from calib.config import TrainConfig, check_launch, check_parts, check_settings
from calib.study.config import DatasetConfig, MethodConfig, StudyConfig
from calib.study.overrides import merged
from data.errors import InputError
from data.settings import load_settings


@dataclass(frozen=True)
class Cell:
    """One training run of a study, with the settings that it gives."""

    dataset: str
    method: str
    config: TrainConfig

    @property
    def name(self) -> str:
        """Also its folder below that of the study."""
        return f"{self.dataset}/{self.method}"

    @property
    def stage(self) -> str:
        """The stage that is the method's result."""
        return "base" if self.config.head is None else "head"

    def run(self, out: Path) -> Path:
        return out / self.dataset / self.method


def cells_of(study: StudyConfig) -> list[Cell]:
    """Every cell, dataset by dataset, methods in the order of the study.

    Raises:
        InputError: a baseline or dataset that is not there, two rows of one name, mixed images
            that a method cannot have, different bins, or settings that no training run takes.
    """
    _refuse_unknown(study)
    cells = [
        Cell(place, key, _settings(study, (place, dataset), (key, method)))
        for place, dataset in study.datasets.items()
        for key, method in study.methods.items()
    ]
    for cell in cells:
        first = next(other for other in cells if other.dataset == cell.dataset)
        bins = cell.config.evaluation.bins
        if bins != first.config.evaluation.bins:
            remedy = f"{first.name} has {first.config.evaluation.bins}; errors of different bins"
            raise InputError(f"{cell.name}: evaluation.bins", bins, f"{remedy} cannot be compared")
    return cells


def check_cells(cells: Sequence[Cell]) -> None:
    """Find what cannot be trained before anything is.

    Raises:
        InputError: what `calib.config` refuses, with the cell's name.
    """
    for cell in cells:
        with naming(cell.name):
            check_settings(cell.config)
            check_launch(cell.config, processes=1)
    for cell in cells:  # torch is imported here
        with naming(cell.name):
            check_parts(cell.config)


@contextmanager
def naming(cell: str) -> Iterator[None]:
    """Put the cell's name before the field of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{cell}: {error.field}", error.value, error.remedy) from None


def choose(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells of these names, `*` and `?` as in file names; all of them without any.

    Raises:
        InputError: a name that no cell has.
    """
    for pattern in only:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            names = ", ".join(cell.name for cell in cells)
            raise InputError("--only", pattern, f"no cell has this name; there are {names}")
    return [
        cell
        for cell in cells
        if not only or any(fnmatchcase(cell.name, pattern) for pattern in only)
    ]


def _refuse_unknown(study: StudyConfig) -> None:
    if study.baseline not in study.methods:
        raise InputError("baseline", study.baseline, f"choose one of {', '.join(study.methods)}")
    for key, method in study.methods.items():
        for dataset in method.on:
            if dataset not in study.datasets:
                known = ", ".join(study.datasets)
                raise InputError(f"methods.{key}.on", dataset, f"choose one of {known}")
    rows = [row for key, method in study.methods.items() for row in row_names(key, method)]
    for row in rows:
        if rows.count(row) > 1:
            raise InputError("methods", row, "two rows have this name; give each its own")


def row_names(key: str, method: MethodConfig) -> list[str]:
    """What the rows of a method are called: as trained, then the post-hoc ones."""
    return [method.name or key, *method.post_hoc]


def _settings(
    study: StudyConfig, dataset: tuple[str, DatasetConfig], method: tuple[str, MethodConfig]
) -> TrainConfig:
    (place, given), (key, own) = dataset, method
    with naming(f"{place}/{key}"):
        values = merged(study.base, given.overrides)
        if not own.mixed:
            values.pop("mixed", None)
        for overrides in (own.overrides, own.on.get(place, {})):
            values = merged(values, overrides)
        _refuse_misplaced(values, place, mixed=own.mixed)
        named = {"name": own.name or key, "seeds": study.seeds}
        return load_settings(TrainConfig, {**values, **named})


def _refuse_misplaced(values: Mapping[str, Any], dataset: str, *, mixed: bool) -> None:
    for key in ("name", "seeds"):
        if key in values:
            raise InputError(key, values[key], "leave it out; a study gives each run its own")
    given = values.get("mixed") is not None
    if given and not mixed:
        remedy = "this method trains on real images alone; set its `mixed` to true"
        raise InputError("mixed", "as given", remedy)
    if mixed and not given:
        remedy = f"give the dataset mixed images: datasets.{dataset}.overrides.mixed.url"
        raise InputError("mixed", "nothing", remedy)
