"""semix audit."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Json, Url
from flows.terminal import emit, emit_json, say_error


def audit(
    url: Url,
    labels: Annotated[str, typer.Option(help="digest of a label set; default: in the shards")] = "",
    index: Annotated[str, typer.Option(help="index/N.json to read; default: the newest")] = "",
    judge: Annotated[
        Path | None, typer.Option(help="run folder; its classifiers judge the end points")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder; default: audit-NAME of the root")
    ] = None,
    json: Json = False,
) -> None:
    """Measure a mixed dataset's labels and images; flag series; write a page.

    Exit status 1 only if shards cannot be read.
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
