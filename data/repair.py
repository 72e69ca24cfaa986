"""Put aside what is damaged, with a tombstone, so that it is made again."""

import json
from collections.abc import Iterable

from data.errors import InputError
from data.indices import PARTS
from data.leases import claim, release
from data.root import PROTOTYPES, Root
from data.verification import Problem

REMEDY = "bring back the file that was there, or build into a new place"


def put_aside(root: Root, problems: Iterable[Problem]) -> int:
    """Discard damaged shards and prototypes; how many.

    A shard that a living process works on is left to it. Damaged parts of indices go too: the
    next index is written with them anew where the records still say the same. Other problems (an
    index, a folder in a record's place) are a person's to repair, and are passed over.
    """
    return sum(_put_aside(root, problem) for problem in problems)


def refuse_other_prototypes(root: Root, ours: str) -> None:
    """Raises InputError if committed shards were labelled with other prototypes than ours.

    Args:
        ours: SHA-256 of the prototypes file that is there, or is about to be.
    """
    named = root.sums().prototypes
    if count := named.total() - named[""] - named[ours]:
        text = f"are not those that {count} shards, {_first_of_others(root, ours)} on, were"
        remedy = f"{text} labelled with; {REMEDY}"
        raise InputError(f"{root.url}/{PROTOTYPES}", ours[:12], remedy)


def _first_of_others(root: Root, ours: str) -> int:
    """The first shard that was labelled with other prototypes."""
    labelled = (entry for found in root.folders() for entry in found.values())
    return next(e["shard"] for e in labelled if e.get("prototypes", ours) != ours)


def _put_aside(root: Root, problem: Problem) -> bool:
    if problem.kind == "prototypes" and problem.files:
        _bury(root, problem)
    elif problem.shard is not None and _is_discardable(problem):
        if not claim(root.store, problem.shard):
            return False
        try:
            _discard(root, problem.shard, problem)
        finally:
            release(root.store, problem.shard)
    elif problem.kind == "labels" or _is_part(problem):
        _remove(root, problem.files)
    else:
        return False
    return True


def _is_discardable(problem: Problem) -> bool:
    return problem.kind == "shard" or (problem.kind == "record" and bool(problem.files))


def _is_part(problem: Problem) -> bool:
    return problem.kind == "index" and any(name.startswith(PARTS) for name in problem.files)


def _discard(root: Root, shard: int, problem: Problem) -> None:
    root.discard(shard, why=problem.text)
    # Of the same bytes the new file has the same name, and a store may keep what is there.
    record = f"{shard:07d}.json"
    _remove(root, [name for name in problem.files if not name.endswith(record)])


def _bury(root: Root, problem: Problem) -> None:
    number = 1
    note = json.dumps({"why": problem.text}).encode()
    while not root.store.create(f"discarded/prototypes.{number}.json", note):
        number += 1
    _remove(root, problem.files)


def _remove(root: Root, names: Iterable[str]) -> None:
    for name in names:
        root.store.delete(name)
