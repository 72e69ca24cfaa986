"""Compare a root with its records: sizes by one listing; on request every byte and image."""

import os
from collections.abc import Container, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from data.records import RECORD, Records, record_name
from data.store import Fact
from data.threads import mapped
from data.verification.contents import Expected, features_problems, tar_problems
from data.verification.label_sets import label_problems
from data.verification.problem import Problem
from data.verification.prototypes import prototypes_problems
from data.verification.references import index_problems, stray_files

if TYPE_CHECKING:
    from data.root import Root

Record = dict[str, Any]


def verify(root: "Root", *, full: bool = False) -> Iterator[Problem]:
    """All that is wrong, as it is found.

    Args:
        full: read every record, hash every file, decode every image, check every label.
    """
    store = root.store
    records = Records(store, root.plan["digest"], compact=not full)
    committed = records.committed()
    facts = store.facts("shards")  # after the records: what those name was there before them
    yield from _record_problems(root, records.damaged, committed)
    yield from _folders_for_records(root, facts, committed)
    check = partial(_shard_problem, root, facts, full=full)
    threads = max(2, os.cpu_count() or 1) if full else 1
    shards = (record for shard, record in committed.items() if shard < root.plan["num_shards"])
    yield from filter(None, mapped(check, shards, threads=threads))
    yield from prototypes_problems(root, committed)
    yield from index_problems(root, facts)
    yield from label_problems(root, full=full)
    named = {name for r in committed.values() for name in (r["tar"], r["features"]["name"])}
    yield from stray_files(facts, named)


def _record_problems(
    root: "Root", damaged: dict[str, str], committed: dict[int, Record]
) -> Iterator[Problem]:
    for name, reason in damaged.items():
        shard = int(name[-12:-5])
        yield Problem(shard, f"its commit record {reason}", "record", (name,))
    for shard in committed:
        if shard >= root.plan["num_shards"]:
            text = f"{record_name(shard)} is of no shard of the plan; is an extension missing?"
            yield Problem(shard, text, "record")


def _folders_for_records(
    root: "Root", facts: dict[str, Fact], fine: Container[int]
) -> Iterator[Problem]:
    """Folders that stand where a commit record should go."""
    below = {match[0] for name in facts if (match := RECORD.match(name)) and match[0] != name}
    if root.store.local:  # an empty folder is in no listing
        names = (record_name(s) for s in range(root.plan["num_shards"]) if s not in fine)
        below |= {name for name in names if name not in facts and root.store.exists(name)}
    for name in sorted(below):
        text = f"{name} is a folder, not a commit record; move it away"
        yield Problem(int(name[-12:-5]), text, "record")


def _shard_problem(
    root: "Root", facts: dict[str, Fact], record: Record, *, full: bool
) -> Problem | None:
    found: dict[str, str] = {}
    groups = root.layout.groups_of(record["shard"])
    expected = Expected(groups, root.plan["images_per_group"], len(root.plan["class_names"]))
    if (record["first"], record["groups"]) != (groups.start, len(groups)):
        found[""] = f"holds {record['groups']} groups from {record['first']} on, the plan says else"
    sizes = {record["tar"]: record["bytes"]}
    sizes[record["features"]["name"]] = record["features"]["bytes"]
    for name, check in zip(sizes, (tar_problems, features_problems), strict=True):
        problem = _size_problem(facts.get(name), sizes[name])
        if problem is None and full:
            problem = "; ".join(check(root.store, record, expected)) or None
        if problem:
            found[name] = problem
    if not found:
        return None
    text = "; ".join(f"{name} {problem}".strip() for name, problem in found.items())
    return Problem(record["shard"], text, files=tuple(name for name in found if name in facts))


def _size_problem(fact: Fact | None, size: int) -> str | None:
    if fact is None:
        return "is missing"
    return None if fact.bytes == size else f"has {fact.bytes} bytes, not {size}"
