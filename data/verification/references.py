"""Indices that cannot be relied on, and files that nothing refers to."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.commit_records import RECORD
from data.indices import (
    PARTS,
    PinnedIndex,
    Record,
    index_names,
    open_index,
    part_name,
    part_problem,
)
from data.store import Fact
from data.verification.problem import Problem

if TYPE_CHECKING:
    from data.root import Root
    from data.verification.folder import FolderCheck

OURS = re.compile(r"shards/\d{4}/(\d{7})-[0-9a-f]{8}\.(tar|features\.safetensors)")


@dataclass
class Pinned:
    """A part, and which indices name it; most are named by many.

    Attributes:
        index: the last of these, which reads it.
    """

    part: Record
    index: PinnedIndex
    names: list[str]


class Pins:
    """What the indices of a root pin, compared folder by folder with what is there.

    Args:
        full: read every part.
    """

    def __init__(self, root: "Root", *, full: bool) -> None:
        self.folders: dict[int, dict[str, Pinned]] = {}
        self._names, self._full = index_names(root.store), full
        self._damaged: dict[str, str] = {}
        self._first: dict[str, Record] = {}  # of its shards that are gone or cut
        self._counts: Counter[str] = Counter()
        self._stored = root.store.scan(PARTS)[0]
        for name in self._names:
            try:
                self._note(open_index(root.store, name, plan_digest=root.plan["digest"]))
            except (OSError, ValueError) as error:
                self._damaged[name] = str(error)

    def problems(self, folder: "FolderCheck") -> Iterator[Problem]:
        """Parts of this folder that cannot be read; what they pin is noted for `summary`."""
        for name, pinned in self.folders.get(folder.number, {}).items():
            unlike = pinned.part["files"] != folder.files_digest
            try:
                self._refuse_other_size(name, pinned)
                entries = pinned.index.folder(folder.number) if unlike or self._full else []
            except ValueError as error:
                yield Problem(None, str(error), "index", (name,) * (name in self._stored))
                continue
            changed = [e for e in entries if _size(folder.facts, e["tar"]) != e["bytes"]]
            for index in pinned.names if changed and unlike else ():
                self._first.setdefault(index, changed[0])
                self._counts[index] += len(changed)

    def summary(self) -> Iterator[Problem]:
        """Indices that cannot be read, or that pin what is no longer as it was."""
        for name in self._names:
            if name in self._damaged:
                yield Problem(None, self._damaged[name], "index", (name,))
            elif count := self._counts[name]:
                first = self._first[name]
                text = f"{name}: pins {count} tars that are gone or cut, {first['tar']} on"
                yield Problem(first["shard"], text, "index")

    def _note(self, index: PinnedIndex) -> None:
        for number, part in index.parts.items():
            known = self.folders.setdefault(number, {})
            pinned = known.setdefault(part_name(part), Pinned(part, index, []))
            pinned.names.append(index.name)
            pinned.index = index

    def _refuse_other_size(self, name: str, pinned: Pinned) -> None:
        size = _size(self._stored, name)
        if pinned.index.inline or size == pinned.part["bytes"]:
            return
        problem = "is missing" if size is None else f"has {size} bytes"
        raise ValueError(part_problem(pinned.index.name, name, problem))


def stray_files(facts: Mapping[str, Fact], referred: Collection[str]) -> Iterator[Problem]:
    """Files beside the shards that no commit record names."""
    for name, fact in facts.items():
        if RECORD.match(name) or name in referred:
            continue
        match = OURS.fullmatch(name)
        what = "no commit record names it" if match else "does not belong here"
        text = f"{name}: {what} ({fact.bytes} bytes)"
        yield Problem(int(match[1]) if match else None, text, "orphan")


def _size(facts: Mapping[str, Fact], name: str) -> int | None:
    return facts[name].bytes if name in facts else None
