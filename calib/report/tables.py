"""The tables of methods: for the page, for the terminal and as plain records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from calib.report.methods import (
    ACCURACY,
    ECE,
    KINDS,
    MEASURES,
    NLL,
    Measure,
    Method,
    load_methods,
    paired,
)

KIND_LABELS = {"plain": "as trained", "scaled": "+ temperature scaling"}


@dataclass(frozen=True)
class Cell:
    """One number of a table, as text."""

    mean: str
    note: str = ""  # the standard deviation, or on how many seeds it is better
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A method as trained, or after temperature scaling."""

    label: str
    kind: str
    note: str  # "T = 1.52 ± 0.10" in rows of temperature scaling
    cells: tuple[Cell, ...]


def comparison(methods: Sequence[Method]) -> list[list[Row]]:
    """Mean and standard deviation of every measure: for each method its two rows.

    The best mean of a column is marked among the rows of one kind; equal texts share the mark,
    and a method alone gets none.
    """
    best = {
        (measure.key, kind): _best_text(methods, measure, kind)
        for measure in MEASURES
        for kind in KINDS
        if len(methods) > 1
    }
    return [[_row(method, kind, best) for kind in KINDS] for method in methods]


def differences(methods: Sequence[Method]) -> list[list[Row]]:
    """Mean difference to the first method over shared seeds, and on how many seeds it is better."""
    baseline, *others = methods
    return [
        [
            Row(
                method.label,
                KIND_LABELS[kind],
                "",
                tuple(_difference(method, baseline, measure, kind) for measure in MEASURES),
            )
            for kind in KINDS
        ]
        for method in others
    ]


def summary_table(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """One record a method, ready for JSON; fractions, not percent.

    Returns:
        [{"method", "stage", "run", "seeds", "bins", "temperature": {"mean", "sd"}, and under
        "plain" and "scaled" every measure as {"mean", "sd"}}]; sd is None where there is one seed.
    Raises:
        InputError: a run that `load_methods` refuses.
    """
    return [
        {
            "method": method.label,
            "stage": method.stage,
            "run": str(method.run),
            "seeds": len(method.seeds),
            "bins": method.bins,
            "temperature": _record(*method.temperature()),
            **{
                kind: {m.key: _record(*method.summary(m, kind)) for m in MEASURES} for kind in KINDS
            },
        }
        for method in load_methods(runs)
    ]


def print_table(rows: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """Print what `summary_table` returned: accuracy, ECE and NLL, plain and scaled."""
    seeds = " / ".join(sorted({str(row["seeds"]) for row in rows}))
    caption = f"mean ± standard deviation over seeds ({seeds}); TS: after temperature scaling"
    caption += f"; ECE: {' / '.join(sorted({str(row['bins']) for row in rows}))} bins"
    table = Table(caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    columns = [(ACCURACY, "plain"), (ECE, "plain"), (ECE, "scaled"), (NLL, "plain")]
    columns.append((NLL, "scaled"))
    for measure, kind in columns:
        unit, scaling = (" %" if measure.percent else ""), ("\n+ TS" if kind == "scaled" else "")
        table.add_column(measure.title + unit + scaling, justify="right", no_wrap=True)
    for row in rows:
        numbers = [_spread(measure, **row[kind][measure.key]) for measure, kind in columns]
        # Text, because a method's name may hold what rich takes for markup.
        table.add_row(Text(row["method"]), *numbers)
    print_whole(table, console or Console())


def print_whole(table: Table, console: Console) -> None:
    """Print a table without cutting a word or number, wider than a narrow screen if need be."""
    least = Measurement.get(console, console.options.update(width=10_000), table).minimum
    before, console.width = console.width, max(console.width, least)
    console.print(table)
    console.width = before


def _record(mean: float, sd: float | None) -> dict[str, float | None]:
    return {"mean": mean, "sd": sd}


def _spread(measure: Measure, mean: float, sd: float | None) -> str:
    return measure.text(mean) + (f"±{measure.text(sd)}" if sd is not None else "")


def _best_text(methods: Sequence[Method], measure: Measure, kind: str) -> str:
    choose = max if measure.higher_is_better else min
    return measure.text(choose(method.summary(measure, kind)[0] for method in methods))


def _row(method: Method, kind: str, best: dict[tuple[str, str], str]) -> Row:
    note = ""
    if kind == "scaled":
        mean, sd = method.temperature()
        note = f"T = {mean:.2f}" + (f" ± {sd:.2f}" if sd is not None else "")
    cells = []
    for measure in MEASURES:
        mean, sd = method.summary(measure, kind)
        text = measure.text(mean)
        spread = f"± {measure.text(sd)}" if sd is not None else ""
        cells.append(Cell(text, spread, text == best.get((measure.key, kind))))
    return Row(method.label, KIND_LABELS[kind], note, tuple(cells))


def _difference(method: Method, baseline: Method, measure: Measure, kind: str) -> Cell:
    found = paired(method, baseline, measure, kind)
    if found is None:
        return Cell("n/a", "no shared seed")
    return Cell(measure.text(found.change, signed=True), f"better {found.better}/{found.shared}")
