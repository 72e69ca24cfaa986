"""Results of a study: rows over all replicates, grid choices, comparisons and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from semix.calib.calibrators import PLAIN
from semix.calib.replicates import (
    Comparison,
    Unit,
    UnitValues,
    compare,
    compare_all,
    with_corrected_p,
)
from semix.calib.results import EvalSplit, MethodResult, StageResult, ranks, read_seed_results
from semix.calib.run_folder import is_measured
from semix.calib.shown_measures import ACCURACY, ECE, MEASURE, RANKED, Summary, measures_in
from semix.calib.study import (
    ENSEMBLE,
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

Replicate = tuple[int, int | None]  # split (0 if the study names none) and draw
CellKey = tuple[str, str, str, int, int | None]  # dataset, method, point, and the replicate
Results = Mapping[CellKey, Mapping[int | None, StageResult]]  # by seed, None for the ensemble


def read_results(cells: Sequence[Cell], out: Path) -> Results:
    """Read every seed that was measured with the settings of its cell.

    Of a cell that failed and is not measured completely, no seed counts.

    Raises:
        InputError: a seed was trained under other settings.
    """
    return {
        (cell.dataset, cell.method, cell.point, cell.split or 0, cell.draw): read_seed_results(
            cell.config, cell.run(out), stage=cell.stage
        )
        for cell in cells
        if failure_of(cell.run(out)) is None or is_measured(cell.config, cell.run(out))
    }


@dataclass(frozen=True)
class StudyRow:
    """A row of a study on one dataset, over all replicates.

    Attributes:
        chosen: the chosen combination of each replicate; empty if the row has no choice.
        values: by column and unit; empty for a column that is not measured.
        complete: whether every seed of every replicate is measured.
        rank: rank by ECE on this dataset; None unless complete.
        mean_rank: mean rank over datasets and ranked measures; None unless complete on all.
        tests: comparisons with the baseline, by column; empty for the baseline itself.
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
        """Mean, and deviation over replicates' means, or over seeds if there is one replicate."""
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
    """All rows of one dataset, on its test or validation images; the baseline is one of them.

    Attributes:
        columns: measures on the original images.
        shifted_columns: measures on corrupted and OOD images.
        tested_columns: those of both that are compared.
        contrasts: further comparisons that the study asks for, by new row and old row.
        bins: number of bins of binned measures; None if nothing is measured yet.
        images: number of measured images; None if nothing is measured yet.
    """

    dataset: str
    split: EvalSplit
    columns: tuple[Column, ...]
    shifted_columns: tuple[Column, ...]
    tested_columns: tuple[Column, ...]
    rows: tuple[StudyRow, ...]
    baseline: str
    contrasts: Mapping[tuple[str, str], Mapping[str, Comparison]]
    bins: int | None
    images: int | None


SHIFT = (
    *(Column(measure, part="shift") for measure in (ACCURACY, ECE)),
    Column(ECE, "scaled", part="shift"),
)
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
    """One table per dataset; a row has a mean rank if all seeds are measured on all datasets."""
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
    columns = tuple(map(Column, measures_in("study"))) + (SCALED if on_test else ())
    shifted_columns = SHIFT + OOD if on_test else ()
    rows = _rows(study, dataset, results, split, (*columns, *shifted_columns))
    measured_keys = {key for row in rows.values() for key, values in row.values.items() if values}
    tested_columns = tuple(column for column in TESTED if column.key in measured_keys)
    stages = [stage for row in rows.values() for stage in row.method.seeds.values()]
    bins, images = (stages[0].bins, stages[0].images(split)) if stages else (None, None)
    return DatasetTable(
        dataset,
        split,
        columns,
        tuple(column for column in shifted_columns if column.key in measured_keys),
        tested_columns,
        tuple(_with_tests(rows, baseline, tested_columns, split)),
        baseline,
        _contrasts(study, rows, tested_columns) if on_test else {},
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
            candidates: dict[str, dict[int | None, StageResult]]
            points: dict[Replicate, str | None] = dict.fromkeys(replicates, config.points[0])
            if config.choice is not None:
                points = {}
                for replicate in replicates:
                    candidates = {
                        key[2]: {s: result for s, result in seeds.items() if s is not None}
                        for key, seeds in cells.items()
                        if key[3:] == replicate
                    }
                    points[replicate] = _select_on_validation(
                        config, candidates, replicate, rows, study
                    )
            units = {
                Unit(*key[3:], seed): result
                for key, seeds in cells.items()
                if key[2] == points[key[3:]]
                for seed, result in seeds.items()
                if (seed is None) == (config.kind == ENSEMBLE)
            }
            kind = PLAIN if config.kind == ENSEMBLE else config.kind
            method = MethodResult(config.label, "", Path(), units, kind=kind)
            values = {column.key: column_values(method, column, split) for column in columns}
            chosen = {
                replicate: point for replicate, point in points.items() if point and config.choice
            }
            seeds_per_replicate = 1 if config.kind == ENSEMBLE else len(study.seeds)
            complete = len(units) == len(replicates) * seeds_per_replicate
            rows[config.label] = StudyRow(config, method, chosen, values, complete)
    return rows


def _select_on_validation(
    config: RowConfig,
    candidates: Mapping[str, Mapping[int | None, StageResult]],
    replicate: Replicate,
    rows: Mapping[str, StudyRow],
    study: StudyConfig,
) -> str | None:
    """Select a combination on a replicate's validation images; None until all are measured."""
    choice = config.choice
    assert choice is not None
    references = [rows[choice.of or baseline_row(study)]] if choice.within is not None else []
    references += [rows[choice.match]] if choice.match is not None else []
    reference_seeds = [_seeds_of_replicate(row, replicate) for row in references]
    required = [*candidates.values(), *reference_seeds]
    if not candidates or any(len(seeds) < len(study.seeds) for seeds in required):
        return None
    means = {point: _validation_means(seeds) for point, seeds in candidates.items()}
    return select_combination(choice, means, *map(_validation_means, reference_seeds))


def select_combination(
    choice: GridChoice, means: Mapping[str, Mapping[str, float]], *references: Mapping[str, float]
) -> str:
    """Select a combination of a grid, the first one of equally good ones.

    Args:
        means: mean measures on validation images, by combination.
        references: the same of the row that `within` refers to and of the row to `match`, in this
            order, as far as the choice names them.
    """
    allowed = dict(means)
    if choice.within is not None:
        min_accuracy = references[0]["accuracy"] - choice.within
        allowed = {point: mean for point, mean in means.items() if mean["accuracy"] >= min_accuracy}
        if not allowed:
            return max(means, key=lambda point: means[point]["accuracy"])
    if choice.match is not None:
        confidence = references[-1]["confidence"]
        return min(allowed, key=lambda point: abs(allowed[point]["confidence"] - confidence))
    sign = -1 if choice.by == "accuracy" else 1
    return min(allowed, key=lambda point: sign * allowed[point][choice.by])


def _seeds_of_replicate(row: StudyRow, replicate: Replicate) -> Mapping[int | None, StageResult]:
    """A row's seeds in a replicate; of a row without mixed images, its seeds on the split."""
    split, draw = replicate
    return {
        unit.seed: result
        for unit, result in row.method.seeds.items()
        if unit.split == split and unit.draw in (draw, None)
    }


def _validation_means(seeds: Mapping[int | None, StageResult]) -> dict[str, float]:
    measures = [measured.on_validation for measured in seeds.values()]
    return {key: fmean(each[key] for each in measures) for key in measures[0]}


# Columns


def column_values(method: MethodResult, column: Column, split: EvalSplit) -> dict[Unit, float]:
    """The value of each unit; empty if the column is not measured for this row."""
    needs_test_images = column.part != "test" or column.kind
    if (needs_test_images and split == "validation") or (column.kind and method.kind != PLAIN):
        return {}
    return method.values(column.measure, column.kind or None, column.part, split)


def column_resamples(method: MethodResult, column: Column, split: EvalSplit) -> UnitValues:
    """The values of each unit on bootstrap resamples; without resamples, its single value."""
    values = column_values(method, column, split)
    if column.part == "test" and values:
        return method.resamples(column.measure, column.kind or None, split=split)
    return {unit: [value] for unit, value in values.items()}


# Comparisons and ranks


def _with_tests(
    rows: Mapping[str, StudyRow], baseline: str, tested_columns: Sequence[Column], split: EvalSplit
) -> list[StudyRow]:
    others = [row for label, row in rows.items() if label != baseline]
    by_column = {
        column.key: compare_all(
            {row.label: column_resamples(row.method, column, split) for row in others},
            column_resamples(rows[baseline].method, column, split),
        )
        for column in tested_columns
    }
    return [
        replace(
            row,
            tests={key: tests[row.label] for key, tests in by_column.items() if row.label in tests},
        )
        for row in rows.values()
    ]


def _contrasts(
    study: StudyConfig, rows: Mapping[str, StudyRow], tested_columns: Sequence[Column]
) -> dict[tuple[str, str], dict[str, Comparison]]:
    """The contrasts of the study, with p-values corrected over all of them for each measure."""
    by_pair: dict[tuple[str, str], dict[str, Comparison]] = {pair: {} for pair in study.contrasts}
    for column in tested_columns:
        tests = {}
        for new, old in study.contrasts:
            test = compare(
                *(column_resamples(rows[label].method, column, "test") for label in (new, old))
            )
            if test is not None:
                tests[new, old] = test
        for pair, test in with_corrected_p(tests).items():
            by_pair[pair][column.key] = test
    return {pair: tests for pair, tests in by_pair.items() if tests}


def _ranks(table: DatasetTable) -> dict[str, list[float]]:
    """Ranks of the complete rows by each of the RANKED measures, of which ECE is the first."""
    complete = [row for row in table.rows if row.complete]
    by_measure = [
        ranks([fmean(row.values[measure.key].values()) for row in complete], measure)
        for measure in RANKED
    ]
    return {
        row.label: [row_ranks[index] for row_ranks in by_measure]
        for index, row in enumerate(complete)
    }
