"""The state of the shards of a plan: commit records, failed attempts and tombstones.

A shard is done if its commit record is listed. What a record says is read and compared with the
listed files by whoever needs it: an index, `semix verify`, `semix status --full`.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from semix.data.errors import TooLarge
from semix.data.formats import (
    DISCARDED,
    FAILED,
    PER_FOLDER,
    SHARDS,
    CommitRecord,
    Failure,
    Tombstone,
    attempt_name,
    record_name,
    spec_digest,
)
from semix.data.layout import Layout
from semix.data.store import FileInfo, Store
from semix.data.threads import mapped

MAX_MESSAGE = 10_000  # characters of an error, so that what is written can be read back

RECORD = re.compile(rf"{SHARDS}/\d{{4}}/(\d{{7}})\.json")
FILES = re.compile(rf"{SHARDS}/\d{{4}}/(\d{{7}})-[0-9a-f]{{8}}\.(tar|features\.safetensors)")

ProblemKind = Literal["shard", "record", "prototypes", "index", "labels", "flags", "orphan"]

log = logging.getLogger("semix.root")


@dataclass(frozen=True)
class Problem:
    """A problem of a root or of one shard.

    Attributes:
        shard: number of the shard; None for a problem of the whole root.
        kind: an orphan is a file that nothing refers to; it only takes space.
        files: the files to remove before their content can be made again.
    """

    shard: int | None
    text: str
    kind: ProblemKind = "shard"
    files: tuple[str, ...] = ()

    @property
    def damage(self) -> bool:
        return self.kind != "orphan"

    def __str__(self) -> str:
        return self.text if self.shard is None else f"shard {self.shard}: {self.text}"


@dataclass
class Folder:
    """A thousand shards: the listed files, and the commit records among them.

    Attributes:
        records: those that are of this plan, ascending, whether or not their files are intact.
        problems: damaged and foreign records, and files that are missing or cut.
        infos: all files of the folder by name.
        subfolders: names of folders in it; semix makes none.
    """

    records: list[CommitRecord] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    infos: dict[str, FileInfo] = field(default_factory=dict)
    subfolders: list[str] = field(default_factory=list)

    @property
    def intact(self) -> list[CommitRecord]:
        """Records without a problem."""
        damaged = {problem.shard for problem in self.problems}
        return [record for record in self.records if record.shard not in damaged]

    def unnamed(self) -> dict[str, FileInfo]:
        """Files that are no commit record, and that no commit record names."""
        named = {name for r in self.records for name in (r.tar, r.features.name)}
        return {
            name: info
            for name, info in self.infos.items()
            if name not in named and not RECORD.fullmatch(name)
        }


def listed_shards(store: Store, folder: int) -> list[int]:
    """Numbers of the shards of one folder that have a commit record."""
    return [*record_infos(store.scan(f"{SHARDS}/{folder:04d}", suffix=".json")[0])]


def read_folder(store: Store, number: int, *, plan: str, layout: Layout) -> Folder:
    """Read the commit records of one folder, and compare them with plan and listing.

    Args:
        plan: digest of the plan.
    Raises:
        InputError: a newer version of semix wrote a record.
    """
    infos, subfolders = store.scan(f"{SHARDS}/{number:04d}")
    folder = Folder(infos=infos, subfolders=subfolders)
    names = {record_name(shard): shard for shard in record_infos(infos)}
    contents = store.get_many(names, max_bytes=CommitRecord.MAX_BYTES)
    for name, shard in names.items():
        try:
            if infos[name].bytes > CommitRecord.MAX_BYTES:
                raise ValueError(f"has {infos[name].bytes} bytes, far too many")
            if name not in contents:  # reading it again raises the reason
                contents[name] = store.get(name, max_bytes=CommitRecord.MAX_BYTES)
            record = parse_record(contents[name], shard, plan=plan, where=f"{store.url}/{name}")
        except FileNotFoundError:  # discarded since it was listed
            continue
        except ValueError as error:
            text = f"its commit record {error}"
            folder.problems.append(Problem(shard, text, "record", (name,)))
            continue
        folder.records.append(record)
        folder.problems += _record_problems(store, record, infos, layout)
    return folder


def parse_record(content: bytes, shard: int, *, plan: str, where: str) -> CommitRecord:
    """The commit record of a shard of this plan.

    Raises:
        ValueError: the reason why it is not; InputError: a newer version of semix wrote it.
    """
    record = CommitRecord.read(content, where=where)
    if record.shard != shard:
        raise ValueError(f"is the record of shard {record.shard}")
    if record.spec != spec_digest(plan, shard):
        raise ValueError("belongs to another plan")
    return record


def _record_problems(
    store: Store, record: CommitRecord, infos: Mapping[str, FileInfo], layout: Layout
) -> Iterator[Problem]:
    """Where a record differs from the plan, or its files from their recorded sizes."""
    shard = record.shard
    if shard >= layout.num_shards:
        text = f"{record_name(shard)} is beyond the shards of the plan; is an extension missing?"
        yield Problem(shard, text, "record")
        return
    planned = layout.groups_of(shard)
    if (record.first, record.groups + len(record.left_out)) != (planned.start, len(planned)):
        groups = f"{record.groups} groups from {record.first} on"
        yield Problem(shard, f"holds {groups}, the plan says otherwise")
    sizes = {record.tar: record.bytes, record.features.name: record.features.bytes}
    problems = {name: size_problem(store, name, size, infos) for name, size in sizes.items()}
    if any(problems.values()):
        text = "; ".join(f"{name} {problem}" for name, problem in problems.items() if problem)
        files = tuple(name for name, problem in problems.items() if problem and name in infos)
        yield Problem(shard, text, files=files)


def size_problem(
    store: Store, name: str, size: int, infos: Mapping[str, FileInfo] | None = None
) -> str | None:
    """Why a file is not of its recorded size.

    Args:
        infos: a listing; a file that is not in it is asked for, because a listing may be late.
    """
    try:
        info = (infos or {}).get(name)
        actual = info.bytes if info else store.size(name)
    except FileNotFoundError:
        return "is missing"
    return None if actual == size else f"has {actual} bytes, not {size}"


class Attempts:
    """The failed attempts at shards of a root or of a label set: one file per attempt."""

    def __init__(self, store: Store, folder: str = FAILED) -> None:
        self._store, self._folder = store, folder
        self._name = re.compile(rf"{re.escape(folder)}/\d{{4}}/(\d{{7}})\.(\d{{1,9}})\.json")

    def numbers(self, missing: Iterable[int]) -> dict[int, list[int]]:
        """Numbers of the attempts at these shards, by shard ascending; no file is read."""
        shards = set(missing)
        listed_folders = numbered_folders(self._store, self._folder)
        folders = sorted({shard // PER_FOLDER for shard in shards} & listed_folders)
        by_shard: defaultdict[int, list[int]] = defaultdict(list)
        for attempts in mapped(self._listed, folders, threads=self._store.parallel):
            for shard, number in attempts:
                if shard in shards:
                    by_shard[shard].append(number)
        return {shard: sorted(by_shard[shard]) for shard in sorted(by_shard)}

    def last(self, shard: int) -> int:
        """The number of the last attempt at a shard; 0 if none failed."""
        attempts = self._listed(shard // PER_FOLDER)
        return max((number for attempted, number in attempts if attempted == shard), default=0)

    def read(self, numbers: Mapping[int, Sequence[int]]) -> dict[int, list[Failure]]:
        """The records of attempts; if none of a shard can be read, a record that says why."""
        names = {attempt_name(s, n, self._folder): (s, n) for s in numbers for n in numbers[s]}
        contents = self._store.get_many(names, max_bytes=Failure.MAX_BYTES)
        by_shard: dict[int, list[Failure]] = {shard: [] for shard in numbers}
        unreadable: dict[int, Failure] = {}
        for name, (shard, number) in names.items():
            try:
                # Reading it again raises the reason why it is missing.
                content = contents.get(name) or self._store.get(name, max_bytes=Failure.MAX_BYTES)
                by_shard[shard].append(Failure.read(content, where=name))
            except (FileNotFoundError, ValueError) as error:
                log.warning("%s: %s", name, error)
                message = f"{name}: {error}"
                unreadable[shard] = Failure(
                    shard=shard, attempt=number, error="unknown", message=message, time=0.0
                )
        return {shard: records or [unreadable[shard]] for shard, records in by_shard.items()}

    def add(self, failure: Failure) -> None:
        """Write the record under the next free number, also if two processes write at once."""
        number = 1 + self.last(failure.shard)
        record = failure.model_copy(update={"message": failure.message[:MAX_MESSAGE]})
        while not self._store.create(
            attempt_name(failure.shard, number, self._folder),
            record.model_copy(update={"attempt": number}).written(indent=1),
        ):
            number += 1

    def _listed(self, folder: int) -> list[tuple[int, int]]:
        """Shard and number of each attempt in one folder of shards."""
        names = self._store.scan(f"{self._folder}/{folder:04d}", suffix=".json")[0]
        matches = (self._name.fullmatch(name) for name in names)
        pairs = ((int(match[1]), int(match[2])) for match in matches if match)
        return [pair for pair in pairs if pair[0] // PER_FOLDER == folder]


def record_infos(infos: Mapping[str, FileInfo], folder: str = SHARDS) -> dict[int, FileInfo]:
    """The files among these that are commit records, or labels, by shard."""
    stems = ((name, name[-12:-5]) for name in infos)
    numbered = ((name, int(stem)) for name, stem in stems if stem.isascii() and stem.isdigit())
    return {shard: infos[name] for name, shard in numbered if name == record_name(shard, folder)}


def discard_record(store: Store, shard: int, *, why: str) -> None:
    """Remove a commit record, so that the shard counts as missing and is made again.

    A tombstone, which is written first, keeps the reason and the record's text.
    """
    name = record_name(shard)
    try:
        text = store.get(name, max_bytes=CommitRecord.MAX_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return
    except TooLarge as error:
        text = str(error)
    content = Tombstone(shard=shard, why=why, record=text).written(indent=1)
    number = 1 + Attempts(store, DISCARDED).last(shard)
    while not store.create(attempt_name(shard, number, DISCARDED), content):
        number += 1
    store.delete(name)


def numbered_folders(store: Store, parent: str) -> set[int]:
    """Numbers of the folders below `parent`, each of which is for a thousand shards."""
    matches = (re.fullmatch(rf"{parent}/(\d{{4}})", name) for name in store.scan(parent)[1])
    return {int(match[1]) for match in matches if match}
