"""semix study."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Config, Json
from flows.terminal import emit, emit_json


def study(
    config: Config,
    out: Annotated[Path, typer.Option(help="the study's folder")],
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="as base.epochs=10")
    ] = [],  # noqa: B006 - typer copies it
    slots: Annotated[int, typer.Option(min=0, help="trainers at a time; 0: one a GPU, or one")] = 0,
    only: Annotated[
        list[str], typer.Option(metavar="CELL", help="DATASET/METHOD, as digits/ce or '*/ce'")
    ] = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Train methods x datasets x seeds, or continue; end in one table."""
    from flows.study import study as run

    record = run(config, out, overrides=set_, slots=slots or None, only=only)
    if json:
        emit_json(record)
        return
    emit((out / "study.md").read_text().rstrip())
    emit(f"written: {out / 'study.md'}, study-validation.md, .csv, .tex, .json, figures/")
