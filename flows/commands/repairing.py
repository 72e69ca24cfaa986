"""semix verify, failures, gc."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.options import Json, Url
from flows.terminal import emit, emit_json

if TYPE_CHECKING:
    from data.formats import Failure

TRACEBACK_LINES = 5


def verify(
    url: Url,
    full: Annotated[bool, typer.Option("--full", help="also every hash, image and label")] = False,
    json: Json = False,
) -> None:
    """Compare a mixed dataset with its records.

    Exit status 1 if something is damaged.

    Example:
      semix verify /data/birds-mixed --full
    """
    from data.root import Root
    from data.verify import verify as verified

    root = Root(url)
    found = []
    for problem in verified(root, full=full):
        found.append(problem)
        if not json:
            emit(f"{'' if problem.damage else 'orphan: '}{problem}")
    damaged = sum(problem.damage for problem in found)
    if json:
        emit_json(
            [
                {"shard": p.shard, "kind": p.kind, "problem": p.text, "damage": p.damage}
                for p in found
            ]
        )
    elif damaged:
        again = f"semix resume {root.url}{' --full' * full}"
        emit(f"{damaged} problems; `{again}` makes what is damaged again")
    else:
        orphans = f"; {len(found)} orphans, see `semix gc {root.url}`" if found else ""
        emit(f"{len(root.done())} shards as recorded{orphans}")
    raise typer.Exit(1 if damaged else 0)


def failures(url: Url, json: Json = False) -> None:
    """Why shards that are still missing failed.

    Example:
      semix failures /data/birds-mixed
    """
    from data.root import Root

    found = {shard: _explained(attempts) for shard, attempts in Root(url).failures().items()}
    if json:
        emit_json(found)
        return
    for shard, facts in found.items():
        count, group = facts["attempts"], facts["group"]
        where = "" if group is None else f"group {group}, "
        times = "1 attempt" if count == 1 else f"{count} attempts"
        emit(f"shard {shard}: {facts['error']}: {facts['message']} ({where}{times})")
    emit(
        f"{len(found)} shards; try them again with --retry-failed, or leave them out with "
        "--skip-failed LIMIT"
        if found
        else "no failures"
    )


def gc(
    url: Url,
    remove: Annotated[bool, typer.Option("--remove", help="delete what is shown")] = False,
    older_than: Annotated[
        float, typer.Option(metavar="HOURS", min=0, help="younger files stay")
    ] = 1.0,
    json: Json = False,
) -> None:
    """Show files that nothing refers to any more, or remove them.

    Example:
      semix gc /data/birds-mixed --older-than 24
    """
    from data import garbage
    from data.root import Root

    root, seconds = Root(url), older_than * 3600
    found = garbage.garbage(root, older_than_s=seconds)
    if remove:
        found = garbage.remove(root, found, older_than_s=seconds)
    if json:
        emit_json([{"name": g.name, "bytes": g.bytes, "why": g.why} for g in found])
        return
    for item in found:
        emit(f"{item.name}  {item.bytes} bytes, {item.why}")
    done = "removed" if remove else "could go, with --remove"
    emit(f"{len(found)} files, {sum(item.bytes for item in found)} bytes {done}")


def _explained(attempts: "list[Failure]") -> dict[str, Any]:
    """The last attempt, and how many there were."""
    last = attempts[-1]
    return {
        "attempts": len(attempts),
        "error": last.error,
        "message": last.message,
        "group": last.group,
        "time": last.time,
        "traceback": last.traceback[-TRACEBACK_LINES:],
    }
