"""The rows of a study's table: what a method measured over its seeds on one dataset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from calib.report.methods import Measure, mean_and_sd
from calib.study.cells import row_names
from calib.study.columns import Column
from calib.study.config import StudyConfig
from calib.study.results import Result, Split, Values
from calib.study.statistics import Comparison


@dataclass(frozen=True)
class Summary:
    """One number of the table over the seeds that have it; sd is None where there is one."""

    mean: float
    sd: float | None
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A method as trained, or after a post-hoc method, on one dataset.

    Attributes:
        values: measures by seed; `scaled` likewise, after temperature scaling.
        cells: by column key; None where nothing was measured.
        rank: by ECE on this dataset; `mean_rank` over datasets and calibration measures. None
            unless every seed is measured.
        tests: by measure, against the baseline; none of the baseline.
    """

    label: str
    method: str
    kind: str
    values: Mapping[int, Values]
    scaled: Mapping[int, Values]
    complete: bool
    cells: Mapping[str, Summary | None] = field(default_factory=dict)
    rank: float | None = None
    mean_rank: float | None = None
    tests: Mapping[str, Comparison] = field(default_factory=dict)

    def of(self, column: Column) -> dict[int, float]:
        """One value a seed."""
        source = self.scaled if column.scaled else self.values
        return {seed: values[column.measure.key] for seed, values in source.items()}

    def mean(self, measure: Measure) -> float:
        return fmean(self.of(Column(measure)).values())


def rows_of(
    study: StudyConfig,
    found: Mapping[str, Mapping[int, Result]],
    *,
    split: Split,
    columns: Sequence[Column],
) -> list[Row]:
    """A row for each method and, on test images, for each of its post-hoc methods.

    Args:
        found: results of one dataset, by method and seed.
    """
    rows = []
    for key, method in study.methods.items():
        kinds = ["plain", *method.post_hoc.values()]
        for label, kind in zip(row_names(key, method), kinds, strict=True):
            if split == "test" or kind == "plain":
                rows.append(_row(label, key, kind, found[key], split, len(study.seeds)))
    return _summarised(rows, columns)


def _row(
    label: str, method: str, kind: str, found: Mapping[int, Result], split: Split, seeds: int
) -> Row:
    def values(of_kind: str) -> dict[int, Values]:
        every = {seed: result.values(split, of_kind) for seed, result in found.items()}
        return {seed: measured for seed, measured in every.items() if measured is not None}

    own = values(kind)
    scaled = values("scaled") if kind == "plain" else {}
    return Row(label, method, kind, own, scaled, complete=len(own) == seeds)


def _summarised(rows: Sequence[Row], columns: Sequence[Column]) -> list[Row]:
    """Means and deviations; the best mean of a column among rows that have every seed."""
    best = {column.key: _best_text(rows, column) for column in columns if column.marked}
    return [
        replace(row, cells={column.key: _summary(row, column, best) for column in columns})
        for row in rows
    ]


def _summary(row: Row, column: Column, best: Mapping[str, str | None]) -> Summary | None:
    values = list(row.of(column).values())
    if not values:
        return None
    mean, sd = mean_and_sd(values)
    shown = column.measure.text(mean)
    return Summary(mean, sd, row.complete and shown == best.get(column.key))


def _best_text(rows: Sequence[Row], column: Column) -> str | None:
    """As printed, so that equal figures share the mark; None without two rows to choose from."""
    means = [fmean(values.values()) for row in rows if row.complete and (values := row.of(column))]
    if len(means) < 2:
        return None
    choose = max if column.measure.higher_is_better else min
    return column.measure.text(choose(means))
