"""Indices: `index/N.json` names parts, one a folder of shards, that list commit records."""

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from data.fingerprint import canonical_json, fingerprint
from data.schemas import PER_FOLDER, read_index, read_part
from data.store import Store
from data.sums import Sums
from data.threads import mapped

Record = dict[str, Any]

INDEX = re.compile(r"index/(\d+)\.json")
PARTS = "index/parts"
READERS = 4  # parts on their way or being parsed at a time

log = logging.getLogger("semix.root")


class PinnedIndex:
    """An index of a root, opened; its parts are read when they are asked for.

    Attributes:
        parts: what it says of each, by folder.
        inline: whether an earlier version wrote it, all shards in one file.
    """

    def __init__(self, store: Store, name: str, content: Record) -> None:
        self.name, self.plan = name, content["plan"]
        self.inline = "shards" in content
        self._store, self._content = store, content
        self._shards: dict[int, list[Record]] = {}
        if self.inline:
            by_folder = groupby(map(completed, content["shards"]), key=_folder_of)
            self._shards = {number: list(entries) for number, entries in by_folder}

    @cached_property
    def digest(self) -> str:
        """Identity of what it pins."""
        return fingerprint(self._content)

    @cached_property
    def parts(self) -> dict[int, Record]:
        if self.inline:
            found = self._shards.items()
            return {number: make_part(self.plan, number, rows)[0] for number, rows in found}
        return {part["folder"]: part for part in self._content["parts"]}

    def folder(self, number: int) -> list[Record]:
        """The shards of one folder, ascending; none if it lists none there.

        Raises:
            ValueError: the part is missing or damaged; names it.
        """
        if self.inline:
            return self._shards.get(number, [])
        part = self.parts.get(number)
        return [] if part is None else self._read(part)

    def shards(self) -> Iterator[Record]:
        """All of them, ascending; a few parts are in memory at a time."""
        for entries in mapped(self.folder, self._folders(), threads=READERS):
            yield from entries

    def _folders(self) -> list[int]:
        return list(self._shards if self.inline else self.parts)

    def _read(self, part: Record) -> list[Record]:
        name = part_name(part)
        try:
            content = self._store.get(name)
            if hashlib.sha256(content).hexdigest() != part["sha256"]:
                raise ValueError("does not have the recorded SHA-256")
            found = read_part(content)
            if (found["plan"], found["folder"]) != (self.plan, part["folder"]):
                raise ValueError("is of another plan or folder")
        except FileNotFoundError:
            raise ValueError(part_problem(self.name, name, "is missing")) from None
        except ValueError as error:
            raise ValueError(part_problem(self.name, name, error)) from None
        return [completed(entry) for entry in found["shards"]]


def open_index(store: Store, name: str, *, plan_digest: str | None = None) -> PinnedIndex:
    """An index, of this plan if one is given.

    Raises:
        ValueError: it is damaged, or of another plan.
        FileNotFoundError: it is not there.
    """
    try:
        content = read_index(store.get(name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if plan_digest not in (None, content["plan"]):
        raise ValueError(f"{name}: belongs to another plan")
    return PinnedIndex(store, name, content)


def newest_index(store: Store, plan_digest: str) -> PinnedIndex | None:
    """The newest of this plan that can be read; what cannot is passed over with a warning."""
    for name in reversed(index_names(store)):
        try:
            return open_index(store, name, plan_digest=plan_digest)
        except ValueError as error:
            log.warning("%s; its records are read instead", error)
    return None


def index_names(store: Store) -> list[str]:
    """Names of the indices, oldest first."""
    found = (INDEX.fullmatch(name) for name in store.scan("index", suffix=".json")[0])
    return [match[0] for match in sorted(filter(None, found), key=lambda m: int(m[1]))]


def make_part(plan: str, number: int, entries: Sequence[Record]) -> tuple[Record, bytes]:
    """What an index says of a part of these shards, and the content of its file."""
    content = canonical_json({"plan": plan, "folder": number, "shards": entries}).encode()
    part = {
        "folder": number,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "shards": len(entries),
        "records": records_digest((e["shard"], e["record_bytes"], e["discards"]) for e in entries),
        "files": files_digest(entries),
        "sums": Sums.over(entries).kept(),
    }
    return part, content


def part_name(part: Mapping[str, Any]) -> str:
    """Follows from folder and hash, so that no index can point elsewhere."""
    return f"{PARTS}/{part['folder']:04d}-{part['sha256'][:8]}.json"


def part_problem(index: str, name: str, problem: object) -> str:
    return f"{index}: its part {name} {problem}; `semix resume --full` writes it again"


def records_digest(records: Iterable[tuple[int, int, int]]) -> str:
    """Of number, bytes and discards of each commit record, ascending."""
    return _digest(f"{shard} {size} {count}" for shard, size, count in records)


def files_digest(entries: Iterable[Mapping[str, Any]]) -> str:
    """Of the groups of each shard, and the names and sizes of its files."""
    return _digest(
        f"{e['shard']} {e.get('first')} {e['groups']} {e['tar']} {e['bytes']} "
        f"{e['features']['name']} {e['features']['bytes']}"
        for e in entries
    )


def completed(entry: Record) -> Record:
    """With what indices of earlier versions left out."""
    return {"discards": 0, "record_bytes": 0, **entry}


def _folder_of(entry: Record) -> int:
    number: int = entry["shard"] // PER_FOLDER
    return number


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
