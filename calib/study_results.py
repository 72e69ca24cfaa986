"""Results of a study: rows over all replicates, chosen ones among them, and comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from semix.calib.replicates import Comparison, Unit, UnitValues, compare, compare_all, corrected
from semix.calib.results import (
    MEASURE,
    RANKED,
    EvalSplit,
    MethodResult,
    StageResult,
    Summary,
    measured_seeds,
    ranks,
    shown_in,
)
from semix.calib.study import (
    Cell,
    GridChoice,
    RowConfig,
    StudyConfig,
    baseline_row,
    draws_of,
    rows_of,
)
from semix.calib.study_jobs import failure_of
from semix.calib.tables import SCALED, Column

Replicate = tuple[int, int | None]  # split, 0 where the study names none; draw
CellKey = tuple[str, str, str, int, int | None]  # dataset, method, point, and the replicate
Results = Mapping[CellKey, Mapping[int, StageResult]]  # by seed


def read_results(cells: Sequence[Cell], out: Path) -> Results:
    """Every seed that is measured under the settings of its cell, except cells that failed.

    A replicate chooses nothing before everything else in it is measured.

    Raises:
        InputError: a seed was trained under other settings.
    """
    return {
        (cell.dataset, cell.method, cell.point, cell.split or 0, cell.draw): measured_seeds(
            cell.config, cell.run(out), stage=cell.stage
        )
        for cell in cells
        if failure_of(cell.run(out)) is None
    }


@dataclass(frozen=True)
class StudyRow:
    """A row on one dataset, over all its replicates.

    Attributes:
        chosen: the chosen combination by replicate; empty without a choice.
        values: by column and unit; empty if nothing was measured.
        complete: whether every seed of every replicate is measured.
        rank: by ECE on this dataset; `mean_rank` over datasets and ranked measures. None unless
            complete.
        tests: by column, against the baseline; empty for the baseline.
    """

    config: RowConfig
    method: MethodResult
    chosen: Mapping[Replicate, str]
    values: Mapping[str, Mapping[Unit, float]]
    complete: bool
    rank: float | None = None
    mean_rank: float | None = None
    tests: Mapping[str, Comparison] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.config.label

    @property
    def units(self) -> int:
        """Number of measured classifiers."""
        return len(self.method.seeds)

    def summary(self, column: Column) -> Summary | None:
        """Mean, and deviation over the means of replicates, or over the seeds of a single one."""
        values = self.values.get(column.key)
        if not values:
            return None
        by_replicate: dict[Replicate, list[float]] = {}
        for unit, value in values.items():
            by_replicate.setdefault((unit.split, unit.draw), []).append(value)
        means = [fmean(each) for each in by_replicate.values()]
        return Summary.of(means if len(means) > 1 else values.values())


@dataclass(frozen=True)
class DatasetTable:
    """All rows of one dataset and split of its images; the baseline is among them.

    Attributes:
        columns: on the original images; further: on corrupted and OOD images; tested: the columns
            of both that are compared.
        contrasts: comparisons that the study asks for, by new row and old.
        bins: of the binned errors; images: number measured. None if nothing is measured yet.
    """

    dataset: str
    split: EvalSplit
    columns: tuple[Column, ...]
    further: tuple[Column, ...]
    tested: tuple[Column, ...]
    rows: tuple[StudyRow, ...]
    baseline: str
    contrasts: Mapping[tuple[str, str], Mapping[str, Comparison]]
    bins: int | None
    images: int | None


SHIFT = tuple(Column(MEASURE[key], part="shift") for key in ("accuracy", "ece", "scaled_ece"))
OOD = tuple(Column(MEASURE[key], part="ood") for key in ("auroc", "fpr95"))
TESTED = (
    *(Column(MEASURE[key]) for key in ("accuracy", "ece")),
    SCALED[0],
    Column(MEASURE["nll"]),
    SCALED[1],
    Column(MEASURE["brier"]),
    *SHIFT[1:],
    OOD[0],
)


def make_tables(study: StudyConfig, results: Results, split: EvalSplit) -> list[DatasetTable]:
    """One table per dataset; mean ranks need every seed to be measured on every dataset."""
    tables = [_table(study, dataset, results, split) for dataset in study.datasets]
    all_ranks = [_ranks(table) for table in tables]

    def ranked(row: StudyRow, by_row: Mapping[str, Sequence[float]]) -> StudyRow:
        mean = None
        if all(row.label in of_dataset for of_dataset in all_ranks):
            mean = fmean(rank for of_dataset in all_ranks for rank in of_dataset[row.label])
        rank = by_row[row.label][0] if row.label in by_row else None
        return replace(row, rank=rank, mean_rank=mean)

    return [
        replace(table, rows=tuple(ranked(row, by_row) for row in table.rows))
        for table, by_row in zip(tables, all_ranks, strict=True)
    ]


def _table(study: StudyConfig, dataset: str, results: Results, split: EvalSplit) -> DatasetTable:
    on_test, baseline = split == "test", baseline_row(study)
    columns = tuple(map(Column, shown_in("study"))) + (SCALED if on_test else ())
    further = SHIFT + OOD if on_test else ()
    rows = _rows(study, dataset, results, split, (*columns, *further))
    known = {key for row in rows.values() for key, values in row.values.items() if values}
    tested = tuple(column for column in TESTED if column.key in known)
    stages = [stage for row in rows.values() for stage in row.method.seeds.values()]
    bins, images = (stages[0].bins, stages[0].images(split)) if stages else (None, None)
    return DatasetTable(
        dataset,
        split,
        columns,
        tuple(column for column in further if column.key in known),
        tested,
        tuple(_tested(rows, baseline, tested, split)),
        baseline,
        _contrasts(study, rows, tested) if on_test else {},
        bins,
        images,
    )


# Rows


def _rows(
    study: StudyConfig, dataset: str, results: Results, split: EvalSplit, columns: Sequence[Column]
) -> dict[str, StudyRow]:
    rows: dict[str, StudyRow] = {}
    for config in rows_of(study):
        if split == "test" or config.kind == "plain":
            cells = {
                key: seeds for key, seeds in results.items() if key[:2] == (dataset, config.method)
            }
            draws = draws_of(study, study.methods[config.method])
            replicates = list(product(study.splits or (0,), draws))
            points: dict[Replicate, str | None] = dict.fromkeys(replicates, config.points[0])
            if config.choice is not None:
                points = {}
                for at in replicates:
                    candidates = {key[2]: seeds for key, seeds in cells.items() if key[3:] == at}
                    points[at] = _chosen(config, candidates, at, rows, study)
            units = {
                Unit(*key[3:], seed): result
                for key, seeds in cells.items()
                if key[2] == points[key[3:]]
                for seed, result in seeds.items()
            }
            method = MethodResult(config.label, "", Path(), units, kind=config.kind)
            values = {column.key: column_values(method, column, split) for column in columns}
            chosen = {at: point for at, point in points.items() if point and config.choice}
            complete = len(units) == len(replicates) * len(study.seeds)
            rows[config.label] = StudyRow(config, method, chosen, values, complete)
    return rows


def _chosen(
    config: RowConfig,
    candidates: Mapping[str, Mapping[int, StageResult]],
    at: Replicate,
    rows: Mapping[str, StudyRow],
    study: StudyConfig,
) -> str | None:
    """The combination chosen on a replicate's validation images; None until all are measured."""
    choice = config.choice
    assert choice is not None
    against = [rows[choice.of or baseline_row(study)]] if choice.within is not None else []
    against += [rows[choice.match]] if choice.match is not None else []
    known = [_of_replicate(row, at) for row in against]
    needed = [*candidates.values(), *known]
    if not candidates or any(len(seeds) < len(study.seeds) for seeds in needed):
        return None
    means = {point: _validation(seeds) for point, seeds in candidates.items()}
    return choose_point(choice, means, *map(_validation, known))


def choose_point(
    choice: GridChoice, means: Mapping[str, Mapping[str, float]], *against: Mapping[str, float]
) -> str:
    """The combination that a choice takes, the first of equal ones.

    Args:
        means: by combination, measures on validation images.
        against: measures of the row that `within` counts from, then of the row to `match`, if the
            choice names them.
    """
    allowed = dict(means)
    if choice.within is not None:
        least = against[0]["accuracy"] - choice.within
        allowed = {point: mean for point, mean in means.items() if mean["accuracy"] >= least}
        if not allowed:
            return max(means, key=lambda point: means[point]["accuracy"])
    if choice.match is not None:
        confidence = against[-1]["confidence"]
        return min(allowed, key=lambda point: abs(allowed[point]["confidence"] - confidence))
    sign = -1 if choice.by == "accuracy" else 1
    return min(allowed, key=lambda point: sign * allowed[point][choice.by])


def _of_replicate(row: StudyRow, at: Replicate) -> Mapping[int, StageResult]:
    """A row's seeds in a replicate; those of its split if it uses no drawn images."""
    split, draw = at
    return {
        unit.seed: result
        for unit, result in row.method.seeds.items()
        if unit.split == split and unit.draw in (draw, None)
    }


def _validation(seeds: Mapping[int, StageResult]) -> dict[str, float]:
    measures = [measured.on_validation for measured in seeds.values()]
    return {key: fmean(each[key] for each in measures) for key in measures[0]}


# Columns


def column_values(method: MethodResult, column: Column, split: EvalSplit) -> dict[Unit, float]:
    """One value per unit; empty if the column is not measured for this row."""
    of_the_network = column.part != "kinds" or column.scaled  # only on test images
    if of_the_network and (split == "validation" or method.kind != "plain"):
        return {}
    if column.part != "kinds":
        means = {unit: result.mean_of(column.part) for unit, result in method.seeds.items()}
        return {unit: mean[column.measure.key] for unit, mean in means.items() if mean}
    return method.values(column.measure, "scaled" if column.scaled else None, split=split)


def column_resamples(method: MethodResult, column: Column, split: EvalSplit) -> UnitValues:
    """The same on bootstrap resamples, if those are measured."""
    if column.part == "kinds" and column_values(method, column, split):
        return method.resamples(column.measure, "scaled" if column.scaled else None, split=split)
    return {unit: [value] for unit, value in column_values(method, column, split).items()}


# Comparisons and ranks


def _tested(
    rows: Mapping[str, StudyRow], baseline: str, tested: Sequence[Column], split: EvalSplit
) -> list[StudyRow]:
    others = [row for label, row in rows.items() if label != baseline]
    by_column = {
        column.key: compare_all(
            {row.label: column_resamples(row.method, column, split) for row in others},
            column_resamples(rows[baseline].method, column, split),
        )
        for column in tested
    }
    return [
        replace(
            row,
            tests={key: tests[row.label] for key, tests in by_column.items() if row.label in tests},
        )
        for row in rows.values()
    ]


def _contrasts(
    study: StudyConfig, rows: Mapping[str, StudyRow], tested: Sequence[Column]
) -> dict[tuple[str, str], dict[str, Comparison]]:
    """The further comparisons of the study, corrected over all of them for each measure."""
    by_pair: dict[tuple[str, str], dict[str, Comparison]] = {pair: {} for pair in study.contrasts}
    for column in tested:
        tests = {}
        for new, old in study.contrasts:
            test = compare(
                *(column_resamples(rows[label].method, column, "test") for label in (new, old))
            )
            if test is not None:
                tests[new, old] = test
        for pair, test in corrected(tests).items():
            by_pair[pair][column.key] = test
    return {pair: tests for pair, tests in by_pair.items() if tests}


def _ranks(table: DatasetTable) -> dict[str, list[float]]:
    """Ranks of the complete rows by each measure in RANKED, ECE first."""
    complete = [row for row in table.rows if row.complete]
    by_measure = [
        ranks([fmean(row.values[measure.key].values()) for row in complete], measure)
        for measure in RANKED
    ]
    return {row.label: [r[index] for r in by_measure] for index, row in enumerate(complete)}
