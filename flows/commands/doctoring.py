"""semix doctor."""

from typing import Annotated

import typer

from flows.commands.options import Json, Set
from flows.terminal import emit, emit_json, print_findings

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "not checked": "dim"}


def doctor(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="of a build or a training run; or none")
    ] = "",
    out: Annotated[str, typer.Option(metavar="PLACE", help="to write to: a path or URL")] = "",
    set_: Set = [],  # noqa: B006 - typer copies it
    json: Json = False,
) -> None:
    """What would stop a run: machine, models, images, store, Prefect.

    Changes nothing. Exit status 1 if a check failed.

    Example:
      semix doctor birds.yaml --out /data/birds-mixed
    """
    from flows.doctor import FAILED, examine, subject_of

    findings = list(examine(subject_of(config, set_, out)))
    failed = sum(finding.state == FAILED for finding in findings)
    if json:
        rows = [vars(finding) for finding in findings]
        emit_json({"failed": failed, "findings": rows})
    else:
        print_findings([(f.check, f.state, f.found, f.remedy) for f in findings], COLOURS)
        emit(f"{failed} of {len(findings)} checks failed" if failed else "nothing failed")
    if failed:
        raise typer.Exit(1)
