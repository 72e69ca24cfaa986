"""What the rounds of a loop brought, over all of its splits and draws: loop.md and loop.json."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from semix.calib.replicates import Comparison, Unit, compare
from semix.calib.results import MethodResult, load_methods, value_table
from semix.calib.tables import (
    OVERVIEW,
    Column,
    Table,
    TableCell,
    TableRow,
    as_markdown,
    change_cell,
    csv_text,
    overview,
    summary_table,
)
from semix.data.files import write_atomically, write_json
from semix.data.printable import markdown_text
from semix.data.root import Root
from semix.flows.loop import CHOSEN, EVEN, LOOP_JSON, LOOP_MD, PreparedLoop, Replicate

VALUES_CSV = "values.csv"
Curves = Mapping[str, Sequence[MethodResult]]  # the method of each round, by kind of mixed dataset


def write_loop_tables(prepared: PreparedLoop, out: Path) -> Path:
    """Write loop.md, loop.json and values.csv.

    Returns:
        The path of loop.json.
    """
    curves = _curves(prepared.replicates)
    methods = [*curves[CHOSEN], *curves[EVEN][1:]]
    rounds = []
    for (series, by), new, old in zip(
        _series_by_round(prepared.replicates[0]), curves[CHOSEN], curves[EVEN], strict=True
    ):
        tests = {} if new is old else {c.key: _change(new, old, c) for c in OVERVIEW}
        changes = {key: [t.change, t.low, t.high] for key, t in tests.items() if t is not None}
        rounds.append({"series": series, "by": by, "change": changes})
    seeds = [[replicate.split, replicate.draw] for replicate in prepared.replicates]
    record = {"rounds": rounds, "replicates": seeds, "methods": summary_table(methods)}
    write_atomically(out / LOOP_MD, _document(prepared, curves, methods).encode())
    write_atomically(out / VALUES_CSV, csv_text(value_table(methods)).encode())
    write_json(out / LOOP_JSON, record)
    return out / LOOP_JSON


def _curves(replicates: Sequence[Replicate]) -> Curves:
    """The runs of each round and kind, as one method over all replicates."""
    pooled = []
    for number, run in enumerate(replicates[0].runs):
        seeds, runs = {}, [(replicate, replicate.runs[number]) for replicate in replicates]
        for replicate, each in runs:
            method = load_methods([each.folder])[-1]
            for unit, result in method.seeds.items():
                seeds[Unit(replicate.split or 0, replicate.draw, unit.seed)] = result
        path = run.folder.relative_to(replicates[0].out)
        pooled.append((run, replace(method, seeds=seeds, run=path)))
    return {
        kind: [method for run, method in pooled if run.round == 0 or run.kind == kind]
        for kind in (CHOSEN, EVEN)
    }


def _series_by_round(replicate: Replicate) -> list[tuple[int, str]]:
    """Number of series after each round, and by what its own were planned."""
    series, result = 0, list[tuple[int, str]]()
    for planned in Root(str(replicate.out / CHOSEN)).rounds()[: replicate.runs[-1].round + 1]:
        series += planned["series"]
        result.append((series, replicate.settings.by if result else "even"))
    return result


def _change(new: MethodResult, old: MethodResult, column: Column) -> Comparison | None:
    """The change by choosing the pairs; None if the rounds share no seed."""
    kind = column.kind or None
    return compare(new.resamples(column.measure, kind), old.resamples(column.measure, kind))


def _document(prepared: PreparedLoop, curves: Curves, methods: Sequence[MethodResult]) -> str:
    means, count = overview(methods), len(prepared.replicates)
    note = means.note if count == 1 else f"{count} splits and draws; {means.note}"
    parts = [
        f"# {markdown_text(prepared.name)}",
        as_markdown(means),
        f"{note[0].upper()}{note[1:]}.",
        "Changes by choosing pairs, against as many series drawn evenly, with 95 % intervals:",
        as_markdown(_changes(curves)),
    ]
    return "\n\n".join(parts) + "\n"


def _changes(curves: Curves) -> Table:
    rows = []
    for new, old in zip(curves[CHOSEN][1:], curves[EVEN][1:], strict=True):
        tests = [(column.measure, _change(new, old, column)) for column in OVERVIEW]
        cells = [change_cell(test, measure) if test else TableCell() for measure, test in tests]
        rows.append(TableRow(new.label, cells))
    return Table("", "", [column.title for column in OVERVIEW], rows)
