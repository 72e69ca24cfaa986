"""semix doctor, config."""

import json as json_text
import shutil
import textwrap
from typing import Annotated, Any, Literal

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


def config(
    command: Annotated[
        Literal["build", "train", "study"],
        typer.Argument(metavar="COMMAND", help="whose config: build, train or study"),
    ],
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="a section or a setting; default: all")
    ] = "",
    json: Json = False,
) -> None:
    """What a config may hold: key, type, default, what it means.

    Example:
      semix config build mixing
    """
    from flows.configs import reference

    rows = reference(command, key)
    if json:
        emit_json(rows)
        return
    width = shutil.get_terminal_size().columns
    for row in rows:
        emit(textwrap.fill(_told(row), width, subsequent_indent="    "))
        if row["description"]:
            emit(textwrap.indent(textwrap.fill(row["description"], width - 4), "    "))


def _told(row: dict[str, Any]) -> str:
    """`epochs: whole number, at least 1; default 200`."""
    text = ", ".join([f"{row['key']}: {row['type']}", *row["limits"]])
    if row["required"]:
        return f"{text}; required"
    if row["default"] is None or row["type"] == "section":
        return text
    return f"{text}; default {json_text.dumps(row['default'], ensure_ascii=False)}"
