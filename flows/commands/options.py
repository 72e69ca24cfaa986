"""Arguments and options that several commands share."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from data.ranges import parse_ranges
from flows.slots.settings import MOST_SLOTS

if TYPE_CHECKING:
    from data.shard_numbers import ShardNumbers

Config = Annotated[str, typer.Argument(help="YAML file: a path or URL", show_default=False)]
Url = Annotated[str, typer.Argument(help="root of a mixed dataset", show_default=False)]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="as mixing.seed=7")]
Slots = Annotated[
    int,
    typer.Option(min=0, max=MOST_SLOTS, help="worker processes; 0: one a GPU, or one"),
]
Runner = Annotated[Literal["local", "dask", "ray"], typer.Option(help="where the slots are")]
Cluster = Annotated[
    str, typer.Option(metavar="ADDRESS", help="of a Dask or Ray cluster; default: one of our own")
]
Range = Annotated[
    str, typer.Option("--range", metavar="i/n", help="begin with this part of all, as 0/4")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="to run networks on")]
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


def chosen(shards: str) -> "ShardNumbers | frozenset[int]":
    return parse_ranges(shards) if shards else frozenset()
