"""semix verify, failures."""

from typing import Annotated

import typer

from flows.commands.options import Json, Url
from flows.terminal import emit, emit_json


def verify(
    url: Url,
    full: Annotated[bool, typer.Option(help="also every hash and image")] = False,
    json: Json = False,
) -> None:
    """Compare every committed shard with its record; exit status 1 if one is damaged."""
    from data.root import Root

    root = Root(url)
    problems = root.verify(full=full)
    if json:
        emit_json([{"shard": problem.shard, "problem": problem.text} for problem in problems])
    else:
        emit("\n".join(map(str, problems)) or f"{len(root.committed())} shards as recorded")
    raise typer.Exit(1 if problems else 0)


def failures(url: Url, json: Json = False) -> None:
    """Why shards that are still missing failed."""
    from data.root import Root

    found = Root(url).failures()
    if json:
        emit_json(found)
        return
    for shard, attempts in found.items():
        last = attempts[-1]
        emit(f"shard {shard}, attempt {last['attempt']}: {last['error']}: {last['message']}")
    if not found:
        emit("no failures")
