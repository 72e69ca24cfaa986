"""Compare finished runs on one page and in a table."""

from collections.abc import Sequence
from pathlib import Path

from semix.calib.results import load_methods
from semix.calib.tables import overview, print_table, summary_table
from semix.data.errors import InputError
from semix.data.files import read_json
from semix.data.root import Root
from semix.flows.paths import output_file
from semix.flows.terminal import emit, emit_json


def report(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    mixed: str = "",
    title: str = "semix",
    as_json: bool = False,
) -> None:
    """Write the page `out` and print its table.

    Args:
        runs: run folders; the first is the baseline.
        mixed: root of the mixed dataset; by default the first one that a run trained on.
    Raises:
        InputError: a run that is not evaluated; a mixed dataset that cannot be read.
    """
    folders, page = [Path(run) for run in runs], Path(out)
    if output_file("--out", page).is_dir():
        raise InputError("--out", page, "is a folder; name a file in it")
    methods = load_methods(folders)
    url = mixed or mixed_of(folders)
    if url is not None:
        Root(url)
    from semix.calib.page import write_report  # torch and matplotlib cost seconds

    write_report(page, runs=folders, mixed=url, agreement=None, facts={}, title=title)
    rows = summary_table(methods)
    if as_json:
        emit_json({"report": str(page), "methods": rows})
        return
    print_table(overview(rows))
    emit(str(page))


def mixed_of(runs: Sequence[Path]) -> str | None:
    """URL of the first mixed dataset that the runs trained on."""
    for run in runs:
        if (run / "data.json").is_file() and (mixed := read_json(run / "data.json")["mixed"]):
            return str(mixed["url"])
    return None
