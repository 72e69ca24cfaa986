"""Compare finished runs on one page and in a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from semix.calib.results import MethodResult, load_methods, value_table
from semix.calib.tables import overview, print_table, summary_table
from semix.data.errors import InputError
from semix.data.files import read_json
from semix.data.root import Root
from semix.flows.paths import output_file
from semix.flows.terminal import emit, emit_json

if TYPE_CHECKING:
    from pandas import DataFrame


def report(
    runs: Sequence[str | Path], out: str | Path, *, mixed: str = "", title: str = "semix"
) -> "DataFrame":
    """Write the page `out`.

    Args:
        runs: run folders; the first is the baseline.
        mixed: root of the mixed dataset; by default the first one that a run trained on.
    Returns:
        All measured values, as `semix.results` of these runs.
    Raises:
        InputError: a run that is not evaluated; a mixed dataset that cannot be read.
    """
    return value_table(_write_page(runs, out, mixed=mixed, title=title))


def print_report(
    runs: Sequence[str | Path], out: str | Path, *, mixed: str, title: str, as_json: bool
) -> None:
    """As `report`; print the overview instead of returning the values."""
    methods = _write_page(runs, out, mixed=mixed, title=title)
    if as_json:
        emit_json({"report": str(out), "methods": summary_table(methods)})
        return
    print_table(overview(methods))
    emit(str(out))


def _write_page(
    runs: Sequence[str | Path], out: str | Path, *, mixed: str, title: str
) -> list[MethodResult]:
    """Write the page; returns the methods on it."""
    folders, page = [Path(run) for run in runs], Path(out)
    if output_file("--out", page).is_dir():
        raise InputError("--out", page, "is a folder; name a file in it")
    methods = load_methods(folders)
    url = mixed or mixed_of(folders)
    if url is not None:
        Root(url)
    from semix.calib.page import write_report  # torch and matplotlib cost seconds

    write_report(page, runs=folders, mixed=url, agreement=None, facts={}, title=title)
    return methods


def mixed_of(runs: Sequence[Path]) -> str | None:
    """URL of the first mixed dataset that the runs trained on."""
    for run in runs:
        if (run / "data.json").is_file() and (mixed := read_json(run / "data.json")["mixed"]):
            return str(mixed["url"])
    return None
