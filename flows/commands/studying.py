"""semix study."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Config, Json, setting
from flows.terminal import emit, emit_json


def study(
    config: Config,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="of the study")],
    set_: Annotated[list[str], setting("base.epochs=10")] = [],  # noqa: B006 - typer copies it
    slots: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="trainers at a time; default: one a GPU, or one",
            show_default=False,
        ),
    ] = 0,
    only: Annotated[
        list[str],
        typer.Option(metavar="CELL", help="DATASET/METHOD, as digits/ce or '*/ce'; repeatable"),
    ] = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Train methods x datasets x seeds, or continue; ends in a table.

    Example:
      semix study configs/study-quickstart.yaml --out digits
    """
    from flows.study import study as run

    record = run(config, out, overrides=set_, slots=slots or None, only=only)
    if json:
        emit_json(record)
        return
    emit((out / "study.md").read_text().rstrip())
    emit(f"written: {out / 'study.md'}, study-validation.md, .csv, .tex, .json, figures/")
