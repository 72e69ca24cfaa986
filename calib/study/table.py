"""The table of one dataset: methods against measures, with ranks and tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from calib.study.cells import row_names
from calib.study.columns import MEASURED, RANKED, SCALED, TESTED, Column
from calib.study.config import StudyConfig
from calib.study.results import Results, Split
from calib.study.rows import Row, rows_of
from calib.study.statistics import Comparison, compare, holm, ranks


@dataclass(frozen=True)
class Table:
    """All rows of one dataset and split; the baseline is among them.

    Attributes:
        bins: of the binned errors, and `images` measured; None where nothing is measured yet.
    """

    dataset: str
    split: Split
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str
    bins: int | None
    images: int | None


def make_tables(study: StudyConfig, results: Results, split: Split) -> list[Table]:
    """One table a dataset; ranks are means over the datasets on which every seed is measured."""
    tables = [_table(study, dataset, results, split) for dataset in study.datasets]
    places = [_ranks(table) for table in tables]
    return [
        replace(
            table,
            rows=tuple(
                replace(
                    row,
                    rank=own[row.label][0] if row.label in own else None,
                    mean_rank=_mean_rank(row.label, places),
                )
                for row in table.rows
            ),
        )
        for table, own in zip(tables, places, strict=True)
    ]


def _table(study: StudyConfig, dataset: str, results: Results, split: Split) -> Table:
    columns = (*MEASURED, *SCALED) if split == "test" else MEASURED
    found = {key: results[f"{dataset}/{key}"] for key in study.methods}
    baseline = row_names(study.baseline, study.methods[study.baseline])[0]
    rows = _tested(rows_of(study, found, split=split, columns=columns), baseline)
    first = next((result for seeds in found.values() for result in seeds.values()), None)
    bins, images = (None, None) if first is None else (first.bins, first.images(split))
    return Table(dataset, split, columns, tuple(rows), baseline, bins, images)


def _tested(rows: Sequence[Row], baseline: str) -> list[Row]:
    against = next(row for row in rows if row.label == baseline)
    others = [row for row in rows if row is not against]
    tests: dict[str, dict[str, Comparison]] = {row.label: {} for row in rows}
    for measure in TESTED:
        column = Column(measure)
        found = {
            row.label: compare(
                row.of(column), against.of(column), higher_is_better=measure.higher_is_better
            )
            for row in others
        }
        known = {label: test for label, test in found.items() if test is not None}
        corrected = holm([test.p for test in known.values()])
        for (label, test), p in zip(known.items(), corrected, strict=True):
            tests[label][measure.key] = replace(test, p_holm=p)
    return [replace(row, tests=tests[row.label]) for row in rows]


def _ranks(table: Table) -> dict[str, list[float]]:
    """Ranks by each measure in RANKED, ECE first, of the rows that have every seed."""
    complete = [row for row in table.rows if row.complete]
    columns = [ranks([row.mean(measure) for row in complete]) for measure in RANKED]
    return {row.label: [column[place] for column in columns] for place, row in enumerate(complete)}


def _mean_rank(label: str, places: Sequence[Mapping[str, Sequence[float]]]) -> float | None:
    if not all(label in ranked for ranked in places):
        return None
    return fmean(rank for ranked in places for rank in ranked[label])
