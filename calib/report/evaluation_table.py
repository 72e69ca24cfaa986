"""One run's measures as tables for the terminal: with intervals, under shift, foreign images."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calib.report.facets import foreign_facet, shift_facet
from calib.report.methods import MEASURES, Measure, Method, mean_and_sd
from calib.report.tables import print_whole

ROWS = {"plain": "as trained", "scaled": "+ TS", "vector": "+ vector", "isotonic": "+ isotonic"}
BY_KEY = {measure.key: measure for measure in MEASURES}
COLUMNS = (
    BY_KEY["accuracy"],
    BY_KEY["ece"],
    Measure("adaptive_ece", "AECE", percent=True),
    Measure("classwise_ece", "CECE", percent=True),
    BY_KEY["nll"],
    BY_KEY["brier"],
)


def print_evaluation(methods: Sequence[Method], console: Console | None = None) -> None:
    """Print every stage as trained and after each post-hoc method, then what else was measured."""
    console = console or Console()
    for method in methods:
        print_whole(_measures(method), console)
    for facet in (shift_facet(methods), foreign_facet(methods)):
        if facet is not None:
            table = _table(facet.title, facet.note, facet.columns)
            for label, cells in facet.rows:
                table.add_row(Text(label), *cells)
            print_whole(table, console)


def _measures(method: Method) -> Table:
    seeds = len(method.seeds)
    note = f"{method.bins} bins; {seeds} seed{'' if seeds == 1 else 's'}"
    if seeds > 1:
        note += ", mean ± standard deviation"
    if "intervals" in method.rows[0]:
        note += "; in brackets 95 % bootstrap intervals over test images"
    columns = [measure.title + (" %" if measure.percent else "") for measure in COLUMNS]
    table = _table(method.label, note, columns)
    for kind, label in ROWS.items():
        table.add_row(Text(label), *(_cell(method, measure, kind) for measure in COLUMNS))
    return table


def _table(title: str, note: str, columns: Sequence[str]) -> Table:
    # Text, because a method's name may hold what rich takes for markup.
    table = Table(title=Text(title), caption=Text(note), box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _cell(method: Method, measure: Measure, kind: str) -> str:
    mean, sd = mean_and_sd(list(method.values(measure, kind).values()))
    text = measure.text(mean) + (f" ± {measure.text(sd)}" if sd is not None else "")
    limits = [_intervals(row, kind).get(measure.key) for row in method.rows]
    if not all(limits):
        return text
    low, high = (statistics.fmean(limit[end] for limit in limits if limit) for end in (0, 1))
    return f"{text}\n\\[{measure.text(low)}, {measure.text(high)}]"


def _intervals(row: Mapping[str, Any], kind: str) -> Mapping[str, Sequence[float]]:
    by_kind = {"plain": row.get("intervals", {}), **row.get("posthoc_intervals", {})}
    return by_kind.get(kind, {})
