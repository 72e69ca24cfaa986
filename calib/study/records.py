"""A study's tables as CSV and as plain records, in fractions and at full precision."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from calib.study.columns import TESTED
from calib.study.rows import Row
from calib.study.table import Table


def as_csv(tables: Sequence[Table]) -> str:
    """One line a dataset and row; what was not measured is empty."""
    lines = [_line(table, row) for table in tables for row in table.rows]
    output = io.StringIO()
    writer = csv.DictWriter(output, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return output.getvalue()


def table_records(tables: Sequence[Table]) -> dict[str, Any]:
    """By dataset: bins, baseline and rows, each with its summaries and every seed's values."""
    return {
        table.dataset: {
            "bins": table.bins,
            "images": table.images,
            "baseline": table.baseline,
            "rows": [_record(table, row) for row in table.rows],
        }
        for table in tables
    }


def _line(table: Table, row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {
        "dataset": table.dataset,
        "method": row.label,
        "run": f"{table.dataset}/{row.method}",
        "kind": row.kind,
        "seeds": len(row.values),
        "bins": table.bins,
    }
    for column in table.columns:
        summary = row.cells[column.key]
        line[column.key] = None if summary is None else summary.mean
        line[f"{column.key}_sd"] = None if summary is None else summary.sd
    line |= {"rank": row.rank, "mean_rank": row.mean_rank}
    for measure in TESTED:
        test = row.tests.get(measure.key)
        found = {} if test is None else asdict(test)
        for key in ("change", "better", "shared", "p", "p_holm"):
            line[f"{measure.key}_{key}"] = found.get(key)
    return line


def _record(table: Table, row: Row) -> dict[str, Any]:
    summaries = {key: s and {"mean": s.mean, "sd": s.sd} for key, s in row.cells.items()}
    return {
        "method": row.label,
        "run": f"{table.dataset}/{row.method}",
        "kind": row.kind,
        "complete": row.complete,
        "summary": summaries,
        "seeds": {str(seed): dict(values) for seed, values in row.values.items()},
        "scaled": {str(seed): dict(values) for seed, values in row.scaled.items()},
        "rank": row.rank,
        "mean_rank": row.mean_rank,
        "tests": {key: asdict(test) for key, test in row.tests.items()},
    }
