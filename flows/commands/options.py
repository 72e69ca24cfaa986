"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from data.ranges import parse_ranges

Config = Annotated[Path, typer.Argument(help="YAML file", show_default=False)]
Url = Annotated[str, typer.Argument(help="root of a mixed dataset", show_default=False)]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="as mixing.seed=7")]
Slots = Annotated[int, typer.Option(min=0, help="worker processes; 0: one a GPU, or one")]
Shards = Annotated[str, typer.Option(help="only these shards, as in 3,7-9")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="only shards that failed before and are missing")
]
SkipFailed = Annotated[
    str,
    typer.Option(
        metavar="LIMIT",
        help="leave out shards that fail; end well if they are at most so many, as 5 or 1%",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def chosen(shards: str) -> frozenset[int]:
    return parse_ranges(shards) if shards else frozenset()
