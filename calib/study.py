"""A study as a grid of training runs: methods x datasets, who trains what, and what failed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from calib.check import check_launch, check_parts, check_settings
from calib.config import Seeds, TrainConfig
from calib.run_folder import (
    CONFIG,
    DATA,
    MODEL,
    DataRecord,
    pin_data,
    read_data,
    run_digest,
    seed_folder,
)
from data.errors import InputError
from data.files import read_json, write_json
from data.fingerprint import fingerprint
from data.settings import Settings, load_settings

T = TypeVar("T")
PostHoc = Literal["scaled", "vector", "isotonic"]
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")  # no dots, so that --set reaches inside
NAMED = ("loss", "method", "model")  # their other keys are parameters of the part of that name
TRAINED_IN = "trained_in"  # in the metadata of a model that was taken over
FAILURE = "failure.json"

Overrides = dict[str, Any]  # settings of a training run, nested or by dotted names


class DatasetConfig(Settings):
    """One dataset: what differs from `base` for every method."""

    overrides: Overrides = Field({}, description="settings of a training run, as in `base`")


class MethodConfig(Settings):
    """One method: what differs from `base`, and what its results are called."""

    name: str | None = Field(None, min_length=1, description="in tables; none: as its key")
    mixed: bool = Field(
        False, description="trains on the dataset's mixed images beside the real ones"
    )
    overrides: Overrides = Field({}, description="settings of a training run, as in `base`")
    on: dict[str, Overrides] = Field({}, description="further settings on one dataset, by its key")
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
    base: Overrides = Field(
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
    def _are_folders(cls, keyed: dict[str, T]) -> dict[str, T]:
        for key in keyed:
            if not FOLDER.fullmatch(key):
                raise ValueError(f"{key!r} is a folder: letters, digits, _, - and + alone")
        if len({key.lower() for key in keyed}) != len(keyed):  # one folder on some systems
            raise ValueError("two keys differ in upper and lower case alone")
        return keyed


# Cells


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


def _refuse_misplaced(values: Overrides, dataset: str, *, mixed: bool) -> None:
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


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Overrides:
    """`base` with every value of `over` in its place; neither is changed.

    Mappings are merged, anything else is replaced; keys of `over` may be dotted names.

    Raises:
        InputError: a key that is no text, or that goes through a value without parts.
    """
    result = dict(base)
    for key, value in _nested(over).items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            other = key in NAMED and value.get("name", below.get("name")) != below.get("name")
            result[key] = dict(value) if other else merged(below, value)
        else:
            result[key] = value
    return result


def _nested(values: Mapping[str, Any]) -> Overrides:
    """Dotted names as nested mappings."""
    result: Overrides = {}
    for key, value in values.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise InputError("overrides", repr(key), "write settings as section.key or nested")
        *sections, last = key.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise InputError("overrides", key, f"{section} is a value and has no parts")
        inner = _nested(value) if isinstance(value, Mapping) else value
        both = isinstance(inner, dict) and isinstance(place.get(last), dict)
        place[last] = merged(place[last], inner) if both else inner
    return result


# Who trains what: a first stage that several runs have is trained once


@dataclass(frozen=True)
class Job:
    """What one slot does at a stretch: some seeds of runs that share their first stage.

    Attributes:
        runs: folders below that of the study; the first trains the stage for the others.
        seeds: of the cells' seeds, all or some.
        split: other jobs train the other seeds of these runs.
    """

    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    split: bool = False


def plan_jobs(cells: Sequence[Cell], *, slots: int) -> list[Job]:
    """Jobs that fill the slots: the last runs are split by seeds where they are too few."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(f"{cell.dataset} {first_stage(cell.config)}", []).append(cell)
    jobs, rest = [], len(groups) % slots
    for place, group in enumerate(groups.values()):
        seeds, runs = group[0].config.seeds, tuple(cell.name for cell in group)
        whole = place < len(groups) - rest
        parts = 1 if whole else min(len(seeds), -(-slots // rest))
        jobs += [Job(runs, seeds[part::parts], parts > 1) for part in range(parts)]
    return jobs


def first_stage(config: TrainConfig) -> str:
    """Digest of all settings that decide what stage one leaves."""
    return fingerprint({key: value for key, value in config.identity().items() if key != "head"})


def take_over(run: Path, *, seed: int) -> Path | None:
    """Give a seed that was not begun the first stage of a run beside it with the same settings.

    The model file gets this run's digest, and names the run that trained it. The trainer then
    finds the stage done, and refuses it if the data has changed since.

    Returns:
        The run that trained it; None if the seed was begun, or no run beside it has what fits.
    """
    from safetensors.torch import load_file

    from calib.checkpoint import read_metadata, save_tensors

    if seed_folder(run, seed).exists():
        return None
    config = load_settings(TrainConfig, run / CONFIG)
    for sibling in sorted(run.parent.iterdir()):
        path = seed_folder(sibling, seed) / MODEL
        metadata = read_metadata(path)
        data = _trained_on(sibling, config, digest=metadata.get("digest"))
        if data is not None:
            pin_data(data, run)
            own = {TRAINED_IN: sibling.name, **metadata, "digest": run_digest(config, data)}
            save_tensors(seed_folder(run, seed) / MODEL, load_file(path), metadata=own)
            return sibling
    return None


def _trained_on(sibling: Path, config: TrainConfig, *, digest: str | None) -> DataRecord | None:
    """The data of a sibling whose model has this digest, if its first stage is that of `config`."""
    if digest is None or not ((sibling / CONFIG).is_file() and (sibling / DATA).is_file()):
        return None
    other = load_settings(TrainConfig, sibling / CONFIG)
    data = read_data(sibling)
    same = first_stage(other) == first_stage(config) and digest == run_digest(other, data)
    return data if same else None


# Why a run is not measured: a small file in its folder


def note_failure(run: Path, reason: str, *, last_lines: Sequence[str]) -> None:
    """Remember why a run ended.

    Args:
        reason: one line.
        last_lines: the end of the trainer's output.
    """
    write_json(run / FAILURE, {"reason": reason, "last_lines": list(last_lines)})


def forget_failure(run: Path) -> None:
    (run / FAILURE).unlink(missing_ok=True)


def failure_of(run: Path) -> str | None:
    """The reason; None if the run did not fail."""
    path = run / FAILURE
    return str(read_json(path)["reason"]) if path.is_file() else None
