"""Puts an audit into one HTML page that needs nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.files import write_atomically
from data.pages.environment import page_environment
from pipeline.audit.audit import Audit
from pipeline.audit.checks import percent
from pipeline.audit.drawing import bars, curve
from pipeline.audit.figures import histogram
from pipeline.audit.gallery import gallery

SHOWN = 20  # pairs, or classes, at either end


def write_page(path: Path, audit: Audit, *, title: str) -> None:
    """Write one self-contained page: no script, nothing loaded from elsewhere."""
    environment = page_environment(Path(__file__).parent)
    environment.filters["percent"] = percent
    values, overall = audit.values, audit.values["overall"]
    pairs = pair_rows(values["pairs"], audit.source.class_names)
    text = environment.get_template("page.html.j2").render(
        title=title,
        audit=values,
        overall=overall,
        checks=audit.checks,
        look=[check.name for check in audit.checks if not check.ok],
        flagged={flag: len(groups) for flag, groups in values["flags"].items()},
        sections=gallery(audit),
        correlations=bars(overall["correlation"]["histogram"]),
        labels=bars(overall["labels"]["first_class"]),
        curve=overall["weight_curve"] and curve(overall["weight_curve"]),
        pair_medians=bars(histogram(np.array(values["pairs"]["correlation_median"]), -1, 1)),
        pairs=len(pairs),
        worst=pairs[:SHOWN],
        best=pairs[: -SHOWN - 1 : -1] if len(pairs) > SHOWN else [],
        classes=class_rows(values["classes"]),
        shown=SHOWN,
    )
    write_atomically(path, text.encode())


def pair_rows(pairs: Mapping[str, Sequence[Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """One record a pair, the worst first: by end points, then by correlation."""
    judge = pairs.get("end_points_judge") or [None] * len(pairs["series"])
    columns = {**pairs, "end_points_judge": judge}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for row in rows:
        row["name"] = " \N{EN DASH} ".join(names[k] for k in row["classes"])
        row["bars"] = [100 * count / max(row["labels"]) for count in row["labels"]]

    def badness(row: Mapping[str, Any]) -> tuple[float, float]:
        share = row["end_points_nearest"]
        return row["correlation_mean"], 1.0 if share is None else share

    return sorted(rows, key=badness)


def class_rows(classes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record a class with its share of agreeing end points, the worst first."""
    rows = [
        {
            **one,
            "agreed": one["end_points_agreed"] / one["end_points"] if one["end_points"] else None,
        }
        for one in classes
    ]
    if len(rows) <= 2 * SHOWN:
        return rows
    return sorted(rows, key=lambda row: -1.0 if row["agreed"] is None else row["agreed"])[:SHOWN]
