"""Arguments and options that several commands share."""

from typing import Annotated, Any, Literal

import typer

from data.ranges import parse_ranges
from flows.commands.help_pages import MORE
from flows.slots import MOST_SLOTS


def setting(example: str) -> Any:
    return typer.Option("--set", metavar="KEY=VALUE", help=f"a setting, as {example}; repeatable")


Set = Annotated[list[str], setting("mixing.seed=7")]
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file: a path or URL")]
Url = Annotated[str, typer.Argument(metavar="ROOT", help="of a mixed dataset: a path or URL")]
Slots = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        max=MOST_SLOTS,
        help="worker processes; default: one a GPU, or one",
        show_default=False,
    ),
]
Runner = Annotated[
    Literal["local", "dask", "ray"],
    typer.Option(help="where the slots are", rich_help_panel=MORE),
]
Cluster = Annotated[
    str, typer.Option(metavar="ADDRESS", help="of a Dask or Ray cluster; default: one of our own")
]
Range = Annotated[
    str, typer.Option("--range", metavar="i/n", help="begin with this part of all, as 0/4")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="to run networks on")]
Shards = Annotated[str, typer.Option(metavar="LIST", help="only these shards, as in 3,7-9")]
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
Full = Annotated[bool, typer.Option("--full", help="first read every byte and image")]
Labels = Annotated[
    str, typer.Option(metavar="DIGEST", help="of a label set; default: those in the shards")
]
Index = Annotated[str, typer.Option(metavar="NAME", help="as index/3.json; default: the newest")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def chosen(shards: str) -> frozenset[int]:
    return frozenset(parse_ranges(shards) if shards else ())
