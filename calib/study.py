"""A study: training runs of datasets x splits x draws of mixed images x methods."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from semix.calib.calibrators import PLAIN, CalibratorName
from semix.calib.check import check_launch, check_modules, check_settings
from semix.calib.config import Criterion, Seeds, TrainConfig
from semix.data.errors import NOT_SHOWN, InputError
from semix.data.settings import Settings, load_settings, whole_path

T = TypeVar("T")
ENSEMBLE = "ensemble"  # of a method's seeds
PostHoc = CalibratorName | Literal["ensemble"]
RowKind = Literal["plain"] | PostHoc
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")  # no dots, which --set takes for separators
COMPONENT_SECTIONS = ("loss", "method", "model")  # each has a name and its parameters
MIXED = "mixed"  # folder of the mixed datasets that a study makes

Overrides = dict[str, Any]  # of settings of a training run or build: nested, or with dotted names


class DatasetConfig(Settings):
    """One dataset, as settings that override `base` for every method."""

    overrides: Overrides = Field({}, description="settings of a training run, as in `base`")


class GridChoice(Settings):
    """How to choose a grid combination in each replicate, by validation means over its seeds."""

    by: Criterion = Field("nll", description="the measure whose best mean is taken")
    match: str | None = Field(
        None, description="instead: mean confidence closest to that of this row, an earlier one"
    )
    within: float | None = Field(
        None,
        ge=0,
        le=1,
        description="loss of accuracy, a fraction, against `of` that is allowed; if all lose "
        "more, the most accurate is taken",
    )
    of: str | None = Field(None, description="row that `within` counts from; none: the baseline")
    kind: RowKind = Field(PLAIN, description="as trained, or as for `post_hoc`")


class MethodConfig(Settings):
    """One method, as settings that override `base`, and the labels of its results."""

    name: str | None = Field(None, min_length=1, description="in tables; none: as its key")
    mixed: bool | str = Field(
        False,
        description="trains on mixed images in addition to real ones: true, on those that the "
        "dataset names; or on those of a build, by its key",
    )
    overrides: Overrides = Field({}, description="settings of a training run, as in `base`")
    on: dict[str, Overrides] = Field({}, description="further settings on one dataset, by its key")
    post_hoc: dict[str, PostHoc] = Field(
        {},
        description="further rows of the same runs, by name: a post-hoc calibrator, as scaled (by "
        "a temperature) or one of `evaluation.calibrators`, fitted on validation images; or "
        "ensemble, of the seeds, with `evaluation.ensemble`",
    )
    grid: dict[str, dict[str, Overrides]] = Field(
        {},
        description="axes, each with choices by name; every combination is a row, named after its "
        "choices",
    )
    chosen: dict[str, GridChoice] = Field(
        {}, description="further rows by name, each of one combination per replicate"
    )

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        if self.chosen and not self.grid:
            raise ValueError("`chosen` selects combinations of `grid`; give a grid")
        if self.grid and self.post_hoc:
            raise ValueError("`post_hoc` needs a method without `grid`; leave one out")
        return self


class StudyConfig(Settings):
    """A grid of training runs and the table that compares them.

    The settings of a cell are `base`, overridden in turn by its dataset, its method, its method on
    that dataset, and its combination of the method's grid. Keys may be nested or dotted names. A
    loss, model or method with another name replaces the whole section.
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
    splits: Seeds | None = Field(
        None, description="split seeds of the real images, each a replicate; none: as in `base`"
    )
    draws: Seeds | None = Field(
        None, description="seeds of the mixed images made for each split; none: as in `builds`"
    )
    builds: dict[str, Overrides] = Field(
        {},
        description="mixed datasets to make for each split and draw, by key: settings of a build "
        "without `real`, which is that of the runs",
    )
    contrasts: tuple[tuple[str, str], ...] = Field(
        (), description="further pairs of rows to compare, the new one and the old one"
    )
    standins: bool | Literal["medium", "large", "tiny"] = Field(
        False,
        description="train a small generator and a small CLIP on each split's training images, "
        "for the builds; medium: of about an hour on two cores; large: for a GPU; tiny: only for "
        "trying a study in seconds",
    )

    @model_validator(mode="after")
    def _check_needs_builds(self) -> Self:
        if not self.builds and (self.draws or self.standins):
            raise ValueError("`draws` and `standins` need mixed datasets; name some in `builds`")
        return self

    @field_validator("datasets", "methods", "builds")
    @classmethod
    def _check_folder_names(cls, by_key: dict[str, T]) -> dict[str, T]:
        for key in by_key:
            if not FOLDER_NAME.fullmatch(key):
                raise ValueError(f"{key!r} names a folder: use letters, digits, _, - and + only")
        if len({key.lower() for key in by_key}) != len(by_key):  # one folder on some systems
            raise ValueError("two keys differ only in upper and lower case")
        return by_key


# Cells


@dataclass(frozen=True)
class Cell:
    """One training run of a study, with its settings.

    Attributes:
        split, draw: seeds of its replicate; None if the study sets none. A run on real images alone
            has no draw.
        point: its combination of the method's grid, as in the name of its folder; "" without grid.
        build: key of the mixed dataset that the study makes for it; None if it makes none.
    """

    dataset: str
    method: str
    config: TrainConfig
    split: int | None = None
    draw: int | None = None
    point: str = ""
    build: str | None = None

    @property
    def replicate(self) -> str:
        """The name of its replicate, whose runs may share a first stage."""
        return replicate_name(self.dataset, self.split, self.draw)

    @property
    def name(self) -> str:
        """The cell's name, which is also its folder in that of the study."""
        return f"{self.replicate}/{'+'.join(filter(None, (self.method, self.point)))}"

    @property
    def stage(self) -> str:
        """The stage whose result is that of the method: the last one."""
        return "base" if self.config.head is None else "head"

    def run(self, out: Path) -> Path:
        return out / self.name


def replicate_name(dataset: str, split: int | None, draw: int | None) -> str:
    """`digits-split0-draw2`."""
    seeds = {"split": split, "draw": draw}
    parts = [f"{kind}{seed}" for kind, seed in seeds.items() if seed is not None]
    return "-".join([dataset, *parts])


def cells_of(study: StudyConfig, out: Path = Path()) -> list[Cell]:
    """All cells of a study, replicate by replicate, with methods in the order of the study.

    Args:
        out: the study's folder, in which its mixed datasets are made.
    Raises:
        InputError: a baseline, dataset, build or row does not exist, two rows have the same name, a
            method has mixed images where it must not or none where it must, cells have different
            numbers of bins, or no training run accepts the settings.
    """
    _check_methods(study)
    cells = [
        Cell(
            dataset,
            key,
            _settings(study, dataset, key, point, (split, draw), out),
            split,
            draw,
            point.folder,
            method.mixed if isinstance(method.mixed, str) else None,
        )
        for dataset, split in product(study.datasets, study.splits or (None,))
        for key, method in study.methods.items()
        for draw in draws_of(study, method)
        for point in points_of(method)
    ]
    first_cells: dict[str, Cell] = {}
    for cell in cells:
        other = first_cells.setdefault(cell.dataset, cell)
        bins, others = (c.config.evaluation.bins for c in (cell, other))
        if bins != others:
            remedy = f"{other.name} has {others}; errors of different bins cannot be compared"
            raise InputError(f"{cell.name}: evaluation.bins", bins, remedy)
    for row in rows_of(study):
        _check_measured(row, next(cell for cell in cells if cell.method == row.method))
    return cells


def check_cells(cells: Sequence[Cell]) -> None:
    """Refuse cells that cannot be trained, before any training begins.

    Raises:
        InputError: settings are invalid; the message begins with the cell's name.
    """
    for cell in cells:
        # A mixed dataset that the study builds may not exist yet.
        changes = {"mixed": None} if cell.build is not None else {}
        with error_prefix(cell.name):
            check_settings(cell.config.model_copy(update=changes))
            check_launch(cell.config, processes=1)
    for cell in cells:  # afterwards, because this imports torch
        with error_prefix(cell.name):
            check_modules(cell.config)


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Within this context, add a name, such as that of a cell, before the field of InputErrors."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{prefix}: {error.field}", error.value, error.remedy) from None


def select_cells(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Select cells by patterns of names with wildcards `*` and `?`; without patterns, all cells.

    Raises:
        InputError: a pattern matches no cell.
    """
    for pattern in only:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            names = ", ".join(cell.name for cell in cells)
            raise InputError("--only", pattern, f"no cell has this name; choose from {names}")
    return [
        cell
        for cell in cells
        if not only or any(fnmatchcase(cell.name, pattern) for pattern in only)
    ]


# Rows of the tables


@dataclass(frozen=True)
class Point:
    """One combination of a method's grid.

    Attributes:
        folder: its part of the name of the run's folder; "" without a grid.
        choices: the name of the choice on each axis.
    """

    folder: str
    choices: tuple[str, ...]
    overrides: Overrides


def points_of(method: MethodConfig) -> list[Point]:
    """All combinations of a method's grid, the last axis fastest; without a grid a single one."""
    points = []
    for combination in product(*(axis.items() for axis in method.grid.values())):
        overrides: Overrides = {}
        for _, choice in combination:
            overrides = merged(overrides, choice)
        choices = tuple(name for name, _ in combination)
        folder = "+".join(re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") for name in choices)
        points.append(Point(folder, choices, overrides))
    return points


@dataclass(frozen=True)
class RowConfig:
    """A row of a study's tables.

    Attributes:
        method: key of the method.
        points: folders of its combinations, from which `choice` selects one in each replicate;
            without a choice a single one.
        kind: "plain" as trained, a post-hoc calibrator, or "ensemble".
    """

    label: str
    method: str
    points: tuple[str, ...]
    kind: RowKind = PLAIN
    choice: GridChoice | None = None


def rows_of(study: StudyConfig) -> list[RowConfig]:
    """All rows, method by method: as trained, after post-hoc calibration, grid choices."""
    rows = []
    for key, method in study.methods.items():
        name, points = method.name or key, points_of(method)
        for point in points:
            label = f"{name} ({', '.join(point.choices)})" if point.choices else name
            rows.append(RowConfig(label, key, (point.folder,)))
        rows += [RowConfig(label, key, ("",), kind) for label, kind in method.post_hoc.items()]
        folders = tuple(point.folder for point in points)
        rows += [
            RowConfig(label, key, folders, choice.kind, choice)
            for label, choice in method.chosen.items()
        ]
    return rows


def baseline_row(study: StudyConfig) -> str:
    """The label of the baseline's row."""
    return study.methods[study.baseline].name or study.baseline


def draws_of(study: StudyConfig, method: MethodConfig) -> tuple[int | None, ...]:
    """The draws of mixed images with which a method is trained; (None,) without mixed images."""
    return study.draws or (None,) if isinstance(method.mixed, str) else (None,)


def _check_methods(study: StudyConfig) -> None:
    if study.baseline not in study.methods:
        raise InputError("baseline", study.baseline, f"choose one of {', '.join(study.methods)}")
    if study.methods[study.baseline].grid:
        raise InputError("baseline", study.baseline, "has a grid; choose a method of one row")
    for key, method in study.methods.items():
        for dataset in method.on:
            if dataset not in study.datasets:
                names = ", ".join(study.datasets)
                raise InputError(f"methods.{key}.on", dataset, f"choose one of {names}")
        if isinstance(method.mixed, str) and method.mixed not in study.builds:
            names = f"choose one of {', '.join(study.builds)}" if study.builds else "it has none"
            raise InputError(f"methods.{key}.mixed", method.mixed, f"a key of `builds`; {names}")
    rows = rows_of(study)
    _check_rows(rows)
    for label in (label for pair in study.contrasts for label in pair):
        if label not in (row.label for row in rows):
            names = ", ".join(row.label for row in rows)
            raise InputError("contrasts", label, f"no row has this name; choose from {names}")


def _check_rows(rows: Sequence[RowConfig]) -> None:
    labels, folders = list[str](), set[tuple[str, str]]()
    for row in rows:
        if row.label in labels:
            raise InputError("methods", row.label, "two rows have this name; give each its own")
        if row.choice is None and row.kind == "plain":
            folder = row.method, row.points[0].lower()
            if folder in folders:
                raise InputError("methods", row.label, "two combinations would share a folder")
            folders.add(folder)
        for field in ("match", "of"):
            reference = getattr(row.choice, field, None)
            if reference is not None and reference not in labels:
                names = ", ".join(labels)
                field_name = f"methods.{row.method}.chosen.{row.label}.{field}"
                raise InputError(field_name, reference, f"name an earlier row: {names}")
        labels.append(row.label)


def _check_measured(row: RowConfig, cell: Cell) -> None:
    """Raise InputError unless the evaluation of its runs measures what the row shows."""
    evaluation = cell.config.evaluation
    if row.kind == ENSEMBLE and not (evaluation.ensemble and len(cell.config.seeds) > 1):
        remedy = "needs `base.evaluation.ensemble: true` and two seeds or more"
        raise InputError(f"methods.{row.method}: {row.label}", row.kind, remedy)
    if row.kind not in (PLAIN, ENSEMBLE, "scaled", *evaluation.calibrators):
        remedy = "is not among `base.evaluation.calibrators`; add it there"
        raise InputError(f"methods.{row.method}: {row.label}", row.kind, remedy)


def _settings(
    study: StudyConfig,
    dataset: str,
    method: str,
    point: Point,
    replicate: tuple[int | None, int | None],
    out: Path,
) -> TrainConfig:
    config, (split, draw) = study.methods[method], replicate
    with error_prefix(replicate_name(dataset, split, draw) + f"/{method}"):
        values = merged(study.base, study.datasets[dataset].overrides)
        if not config.mixed:
            values.pop("mixed", None)
        for overrides in (config.overrides, config.on.get(dataset, {}), point.overrides):
            values = merged(values, overrides)
        if isinstance(config.mixed, str):
            images_of = _first_dataset_with_same_images(study, dataset)
            replicate_folder = replicate_name(images_of, split, draw)
            url = whole_path(out / MIXED / f"{replicate_folder}-{config.mixed}")
            values = merged(values, {"mixed.url": url})
        if split is not None:
            values = merged(values, {"real.split_seed": split})
        _check_overrides(values, dataset, mixed=bool(config.mixed))
        label = config.name or method
        name = f"{label} ({', '.join(point.choices)})" if point.choices else label
        return load_settings(TrainConfig, {**values, "name": name, "seeds": study.seeds})


def _first_dataset_with_same_images(study: StudyConfig, dataset: str) -> str:
    """The first dataset with the same real images; such datasets share their mixed images."""

    def real(key: str) -> object:
        return merged(study.base, study.datasets[key].overrides).get("real")

    return next(key for key in study.datasets if real(key) == real(dataset))


def _check_overrides(values: Overrides, dataset: str, *, mixed: bool) -> None:
    for key in ("name", "seeds"):
        if key in values:
            raise InputError(key, values[key], "leave it out; a study gives each run its own")
    has_mixed = values.get("mixed") is not None
    if has_mixed and not mixed:
        remedy = "this method trains on real images alone; set its `mixed` to true"
        raise InputError("mixed", NOT_SHOWN, remedy)
    if mixed and not has_mixed:
        remedy = f"give the dataset mixed images: datasets.{dataset}.overrides.mixed.url"
        raise InputError("mixed", "nothing", remedy)


def merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> Overrides:
    """Return `base` with the values of `overrides`; changes neither of them.

    Sections are merged, any other value is replaced. Keys of `overrides` may be dotted names.

    Raises:
        InputError: a key is not a string, or leads through a value that is not a section.
    """
    result = dict(base)
    for key, value in _nested(overrides).items():
        section = result.get(key)
        if isinstance(value, Mapping) and isinstance(section, Mapping):
            name = section.get("name")
            replaces = key in COMPONENT_SECTIONS and value.get("name", name) != name
            result[key] = dict(value) if replaces else merged(section, value)
        else:
            result[key] = value
    return result


def _nested(values: Mapping[str, Any]) -> Overrides:
    """Convert dotted names to nested mappings."""
    result: Overrides = {}
    for key, value in values.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise InputError("overrides", repr(key), "write settings as section.key or nested")
        *sections, last = key.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise InputError("overrides", key, f"{section} is a value and not a section")
        nested_value = _nested(value) if isinstance(value, Mapping) else value
        are_sections = isinstance(nested_value, dict) and isinstance(target.get(last), dict)
        target[last] = merged(target[last], nested_value) if are_sections else nested_value
    return result
