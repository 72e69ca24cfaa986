"""semix audit."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Index, Json, Labels, Url
from flows.terminal import emit, emit_json, say_error


def audit(
    url: Url,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="of the page; default: audit-NAME of the root"),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="run folder; its classifiers judge the end points"),
    ] = None,
    labels: Labels = "",
    index: Index = "",
    json: Json = False,
) -> None:
    """Do the labels fit the images? Measures, flags, writes a page.

    Exit status 1 only if shards cannot be read.

    Example:
      semix audit /data/birds-mixed --out audit
    """
    from flows.audit import audit as run
    from flows.audit import print_checks

    found = run(url, labels=labels or None, index=index or None, judge=judge, out=out)
    if json:
        emit_json(found)
    else:
        print_checks(found["checks"])
        emit(f"page: {found['page']}")
        emit(f"numbers: {found['json']}")
        emit(f"flags: {found['flags_file'] or 'not stored'}")
    for problem in found["unreadable"].values():
        say_error(problem)
    raise typer.Exit(1 if found["unreadable"] else 0)
