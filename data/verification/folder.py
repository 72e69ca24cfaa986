"""One folder of shards: what is listed there against what its records say."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from data.commit_records import RECORD, SHARDS, record_facts, record_name
from data.indices import files_digest
from data.records import Records
from data.seen import Listing
from data.store import Fact, Store
from data.threads import mapped
from data.tombstones import discards
from data.verification.contents import Expected, features_problems, tar_problems
from data.verification.problem import Problem
from data.verification.references import OURS, stray_files

if TYPE_CHECKING:
    from data.root import Root

Record = dict[str, Any]
Facts = Mapping[str, Fact]


class FolderCheck:
    """A thousand shards at most.

    Where the newest index knows just what is listed, its part need not be read.

    Attributes:
        facts: of all files, by name.
        prototypes: how many shards say which they were labelled with.

    Args:
        buried: folders in which shards were discarded.
    """

    def __init__(self, root: "Root", records: Records, number: int, *, buried: set[int]) -> None:
        self.root, self.number = root, number
        gone = discards(root.store, number) if number in buried else {}
        self.facts, self._inner = _everything(root.store, number)
        listing = Listing(number, record_facts(self.facts), gone)
        part = records.index.parts.get(number) if records.index else None
        self._entries: dict[int, Record] = {}
        self._refused: dict[int, str] = {}
        self.as_indexed = bool(
            part and (part["records"], part["files"]) == (listing.digest, self.files_digest)
        )
        if part and self.as_indexed:
            self.prototypes = Counter(part["sums"]["prototypes"])
            return
        self._entries, self._refused = records.entries(listing)
        # Again after the records: what those name was there before them.
        self.facts, self._inner = _everything(root.store, number)
        self.prototypes = Counter(e.get("prototypes", "") for e in self._entries.values())

    @cached_property
    def files_digest(self) -> str | None:
        """As an index keeps it, if every file here is of a shard that has all of its files."""
        return _planned_digest(self.root, self.facts)

    def problems(self, *, full: bool) -> Iterator[Problem]:
        if self.as_indexed:
            return
        for shard, reason in self._refused.items():
            text, name = f"its commit record {reason}", record_name(shard)
            yield Problem(shard, text, "record", (name,))
        yield from self._misplaced()
        check = partial(_shard_problem, self.root, self.facts, full=full)
        threads = max(2, os.cpu_count() or 1) if full else 1
        last = self.root.plan["num_shards"]
        shards = (entry for shard, entry in self._entries.items() if shard < last)
        yield from filter(None, mapped(check, shards, threads=threads))
        entries = self._entries.values()
        named = {name for e in entries for name in (e["tar"], e["features"]["name"])}
        yield from stray_files(self.facts, named)

    def _misplaced(self) -> Iterator[Problem]:
        """Records beyond the plan, and folders that stand where a record should go."""
        for shard in self._entries:
            if shard >= self.root.plan["num_shards"]:
                text = f"{record_name(shard)} is of no shard of the plan; is an extension missing?"
                yield Problem(shard, text, "record")
        for name in self._inner:
            if RECORD.fullmatch(name):
                text = f"{name} is a folder, not a commit record; move it away"
                yield Problem(int(name[-12:-5]), text, "record")


def _everything(store: Store, number: int) -> tuple[dict[str, Fact], list[str]]:
    """All files of a folder, those in folders inside it too, and those folders."""
    files, inner = store.scan(f"{SHARDS}/{number:04d}")
    for folder in inner:
        files |= store.facts(folder)
    return files, inner


def _planned_digest(root: "Root", facts: Facts) -> str | None:
    found: dict[int, dict[str, tuple[str, int]]] = {}
    for name, fact in facts.items():
        if match := OURS.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = (name, fact.bytes)
    whole = all(len(files) == 2 for files in found.values())
    planned = max(found, default=0) < root.plan["num_shards"]
    # Besides its two files a shard has a commit record; more are strays.
    if not whole or not planned or len(facts) != 3 * len(found):
        return None
    return files_digest(_described(root, shard, files) for shard, files in sorted(found.items()))


def _described(root: "Root", shard: int, files: Mapping[str, tuple[str, int]]) -> Record:
    """A shard as an index lists it, by its plan and its files."""
    groups = root.layout.groups_of(shard)
    (tar, size), (features, features_size) = files["tar"], files["features.safetensors"]
    return {
        "shard": shard,
        "first": groups.start,
        "groups": len(groups),
        "tar": tar,
        "bytes": size,
        "features": {"name": features, "bytes": features_size},
    }


def _shard_problem(root: "Root", facts: Facts, record: Record, *, full: bool) -> Problem | None:
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
