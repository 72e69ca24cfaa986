"""semix doctor, config, gc."""

import json as json_text
import shutil
import textwrap
from typing import Annotated, Any, Literal

import typer

from semix.data import garbage
from semix.data.root import Root
from semix.flows import parameters as p
from semix.flows.configs import reference
from semix.flows.terminal import emit, emit_json, print_findings

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "not checked": "dim"}


def doctor(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="config of a build, a training run or a loop")
    ] = "",
    out: Annotated[str, typer.Option(metavar="PLACE", help="where the run would write")] = "",
    overrides: p.BuildOverrides = [],  # noqa: B006 - typer copies it
    json: p.Json = False,
) -> None:
    """Check machine, models, images, store and Prefect before a run.

    It changes nothing. The exit status is 1 if a check failed.

    Example:
      semix doctor birds.yaml --out /data/birds-mixed
    """
    from semix.flows.doctor import FAILED, doctor_input, examine

    findings = list(examine(doctor_input(config, overrides, out)))
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
        Literal["build", "train", "study", "loop"],
        typer.Argument(metavar="COMMAND", help="build, train, study or loop"),
    ],
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="one section or setting; default: all")
    ] = "",
    json: p.Json = False,
) -> None:
    """Show the settings of a config: key, type, default, meaning.

    Example:
      semix config build mixing
    """
    rows = reference(command, key)
    if json:
        emit_json(rows)
        return
    width = shutil.get_terminal_size().columns
    for row in rows:
        emit(textwrap.fill(_setting_line(row), width, subsequent_indent="    "))
        if row["description"]:
            emit(textwrap.indent(textwrap.fill(row["description"], width - 4), "    "))


def _setting_line(row: dict[str, Any]) -> str:
    """`epochs: whole number, at least 1; default 200`."""
    text = ", ".join([f"{row['key']}: {row['type']}", *row["limits"]])
    if row["required"]:
        return f"{text}; required"
    if row["default"] is None or row["type"] == "section":
        return text
    return f"{text}; default {json_text.dumps(row['default'], ensure_ascii=False)}"


def gc(
    url: p.Root,
    remove: Annotated[bool, typer.Option("--remove", help="delete these files")] = False,
    older_than: Annotated[
        float, typer.Option(metavar="HOURS", min=0, help="only files older than this")
    ] = 1.0,
    json: p.Json = False,
) -> None:
    """List or remove files that nothing refers to any more.

    Example:
      semix gc /data/birds-mixed --older-than 24
    """
    root, seconds = Root(url), older_than * 3600
    unused = garbage.garbage(root, older_than_s=seconds)
    if remove:
        unused = garbage.remove(root, unused, older_than_s=seconds)
    if json:
        emit_json([{"name": file.name, "bytes": file.bytes, "why": file.why} for file in unused])
        return
    for file in unused:
        emit(f"{file.name}  {file.bytes} bytes, {file.why}")
    action = "removed" if remove else "can be removed with --remove"
    emit(f"{len(unused)} files, {sum(file.bytes for file in unused)} bytes {action}")
