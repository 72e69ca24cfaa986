"""Write an audit as one self-contained HTML page."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semix.data.files import write_atomically
from semix.data.formats import Flag
from semix.data.pages import SeriesFigure, fixed, page_environment, series_figure
from semix.data.tar import GroupSample
from semix.pipeline.audit import Audit
from semix.pipeline.audit.findings import (
    ClassMetrics,
    CurveValues,
    Histogram,
    PairMetrics,
    histogram,
)
from semix.pipeline.audit.limits import percent

ROWS = 20  # rows in the tables of the best, the worst, and of classes


def write_page(path: Path, audit: Audit, *, title: str) -> None:
    """Write one page without scripts, which loads nothing from elsewhere."""
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
        worst=pairs[:ROWS],
        best=pairs[: -ROWS - 1 : -1] if len(pairs) > ROWS else [],
        classes=class_rows(values["classes"]),
        shown=ROWS,
    )
    write_atomically(path, text.encode())


def pair_rows(pairs: PairMetrics, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per set of classes, the worst first: by mean correlation, then by end points."""
    judge = pairs.get("end_points_judge") or [None] * len(pairs["series"])
    columns: dict[str, Any] = {**pairs, "end_points_judge": judge}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for row in rows:
        row["name"] = " \N{EN DASH} ".join(names[k] for k in row["classes"])
        row["bars"] = [100 * count / max(row["labels"]) for count in row["labels"]]

    def merit(row: Mapping[str, Any]) -> tuple[float, float]:
        agreement = row["end_points_nearest"]
        return row["correlation_mean"], 1.0 if agreement is None else agreement

    return sorted(rows, key=merit)


class ClassRow(ClassMetrics):
    agreed: float | None


def class_rows(classes: Sequence[ClassMetrics]) -> list[ClassRow]:
    """One row per class, with the fraction of its end points that agree; the worst first if there
    are too many to show all."""
    rows: list[ClassRow] = [
        {
            **row,
            "agreed": row["end_points_agreed"] / row["end_points"] if row["end_points"] else None,
        }
        for row in classes
    ]
    if len(rows) <= 2 * ROWS:
        return rows
    return sorted(rows, key=lambda row: -1.0 if row["agreed"] is None else row["agreed"])[:ROWS]


SERIES = 6  # series per section
TITLES: dict[Flag, tuple[str, str]] = {
    "degenerate": ("Degenerate", "Flat, black, white, or with features that are no numbers."),
    "duplicate": ("Like an earlier series", "A picture of each looks like one of another series."),
    "still": ("Neighbours that do not differ", "Alpha moves and the picture stays."),
    "concept": ("Near a concept", "An image of each is nearer to a concept than the rule allows."),
    "end_points": ("End points of another class", "By the nearest prototype of all classes."),
}


@dataclass(frozen=True)
class Section:
    title: str
    note: str
    series: list[SeriesFigure]


def gallery(audit: Audit) -> list[Section]:
    """The non-empty sections, with the images of their series, which are read again."""
    sections = _section_rows(audit)
    selected_rows = sorted({row for _, _, rows in sections for row in rows})
    samples = _read_samples(audit, selected_rows)
    return [
        Section(title, note, [_figure(audit, row, samples[row]) for row in rows])
        for title, note, rows in sections
        if rows
    ]


def _section_rows(audit: Audit) -> list[tuple[str, str, list[int]]]:
    """Title, note and series (as rows of the facts) of each section."""
    series, findings = audit.facts.series, audit.findings
    rho = findings.rho.numpy()
    error = np.abs(series.coordinates - series.mixture).mean((1, 2))  # breaks ties of rho
    order = np.lexsort((error, -rho)).tolist()
    sections = [
        ("Worst series", "The weight follows alpha least.", order[: -SERIES - 1 : -1]),
        (
            "Best series",
            "The weight follows alpha best, and is nearest to it.",
            order[:SERIES],
        ),
    ]
    disagreement = np.nan_to_num(series.disagreement, nan=-1).max(1)  # -1: one encoder only
    if (disagreement >= 0).any():
        rows = np.argsort(-disagreement, kind="stable")[:SERIES].tolist()
        sections.append(("Encoders disagree", "The two CLIP models differ most.", rows))
    for flag, (title, note) in TITLES.items():
        if flag not in findings.flags:
            continue
        rows = np.flatnonzero(findings.flags[flag])
        if flag == "concept":
            rows = rows[np.argsort(-np.nanmax(series.concepts[rows], (1, 2)), kind="stable")]
        rows = rows[:SERIES].tolist()
        sections.append((title, note, _with_partners(audit, rows) if flag == "duplicate" else rows))
    return sections


def _with_partners(audit: Audit, rows: Iterable[int]) -> list[int]:
    """The series that each duplicate resembles, followed by the duplicate; SERIES at most."""
    duplicates = audit.findings.duplicates
    partner = dict(zip(duplicates.rows.tolist(), duplicates.of.tolist(), strict=True))
    pairs = ((partner[row], row) for row in rows)
    return list(dict.fromkeys(row for pair in pairs for row in pair))[:SERIES]


def _read_samples(audit: Audit, rows: Iterable[int]) -> dict[int, GroupSample]:
    series, source = audit.facts.series, audit.source
    samples: dict[int, GroupSample] = {}
    by_shard = {shard.shard: shard for shard in source.shards}
    by_group = {int(series.group[row]): row for row in rows}
    for number in {int(series.shard[row]) for row in by_group.values()}:
        for sample in source.samples(by_shard[number]):
            row = by_group.get(sample.record.group)
            if row is not None:
                samples[row] = sample
    return samples


def _figure(audit: Audit, row: int, sample: GroupSample) -> SeriesFigure:
    notes = [f"\N{GREEK SMALL LETTER RHO} {fixed(float(audit.findings.rho[row]))}"]
    disagreement = float(np.nan_to_num(audit.facts.series.disagreement[row], nan=-1).max())
    if disagreement >= 0:
        notes.append(f"encoders differ by {disagreement:.2f}")
    if audit.values["concepts"] and audit.findings.flags["concept"][row]:
        excess = np.nan_to_num(audit.facts.series.concepts[row], nan=-np.inf)  # [A, C]
        concept = audit.values["concepts"]["concepts"][int(excess.max(0).argmax())]["text"]
        notes.append(f"{concept}: {excess.max():+.3f}")
    images = list(sample.pixels())
    return series_figure(sample.record, images, note=", ".join(notes))


WIDTH, HEIGHT = 520, 300  # units of the drawing; the page scales it
LEFT, BOTTOM, TOP, RIGHT = 36, 26, 8, 16  # room for axis numbers
TICKS = 4


@dataclass(frozen=True)
class Bar:
    """One bin, and its height in percent of the highest bin."""

    low: float
    high: float
    count: int
    height: float


@dataclass(frozen=True)
class Curve:
    """Points of SVG polygons and polylines, and positions of the axis numbers."""

    width: int
    height: int
    bands: list[str]
    median: str
    mean: str
    marks: list[tuple[float, float]]
    identity: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def bars(bins: Histogram) -> list[Bar]:
    """The bars of a histogram, scaled to the highest."""
    edges, counts = bins["edges"], bins["counts"]
    max_count = max(max(counts), 1)
    return [
        Bar(low, high, count, 100 * count / max_count)
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]


def curve(values: CurveValues) -> Curve:
    """The weight along alpha: mean, median, and the bands between outer quantiles."""
    alphas, quantiles = values["alphas"], values["quantiles"]
    weights = [weight for row in quantiles for weight in row] + [0.0, 1.0]
    low, high = min(weights), max(weights)

    def x(alpha: float) -> float:
        return round(LEFT + alpha * (WIDTH - LEFT - RIGHT), 1)

    def y(weight: float) -> float:
        return round(HEIGHT - BOTTOM - (weight - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    def line(row: Sequence[float]) -> list[tuple[float, float]]:
        return [(x(alpha), y(weight)) for alpha, weight in zip(alphas, row, strict=True)]

    middle = len(quantiles) // 2
    bands = zip(quantiles[:middle], reversed(quantiles[middle + 1 :]), strict=True)
    levels = [low + (high - low) * tick / TICKS for tick in range(TICKS + 1)]
    return Curve(
        width=WIDTH,
        height=HEIGHT,
        bands=[_points([*line(under), *reversed(line(over))]) for under, over in bands],
        median=_points(line(quantiles[middle])),
        mean=_points(line(values["mean"])),
        marks=line(values["mean"]),
        identity=_points([(x(0), y(0)), (x(1), y(1))]),
        x_ticks=[(x(tick / TICKS), f"{tick / TICKS:.2f}") for tick in range(TICKS + 1)],
        y_ticks=[(y(level), f"{level:.2f}") for level in levels],
    )


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)
