"""The state of the shards of a plan: commit records, failed attempts and tombstones."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from semix.data.errors import TooLarge
from semix.data.formats import (
    DISCARDED,
    FAILED,
    PER_FOLDER,
    SHARDS,
    CommitRecord,
    Failure,
    ShardEntry,
    Tombstone,
    attempt_name,
    record_name,
    spec_digest,
)
from semix.data.index import ROW, Index, ShardRows, newest_index
from semix.data.store import FileInfo, Store
from semix.data.threads import mapped

MAX_MESSAGE = 10_000  # characters of an error, so that what is written can be read back

RECORD = re.compile(rf"{SHARDS}/\d{{4}}/(\d{{7}})\.json")
FILES = re.compile(rf"{SHARDS}/\d{{4}}/(\d{{7}})-[0-9a-f]{{8}}\.(tar|features\.safetensors)")

log = logging.getLogger("semix.root")


@dataclass
class Folder:
    """The state of a thousand shards, as of the last refresh.

    Attributes:
        rows: one per shard whose record counts, ascending.
        rejected: file info of each record that does not count, and the reason.
        tombstones: how often each shard was discarded; shards that never were are omitted.
        complete: whether every planned shard of this folder counts; then the folder is not listed
            again unless one is discarded.
    """

    rows: np.ndarray = field(default_factory=lambda: np.empty(0, ROW))
    rejected: dict[int, tuple[FileInfo, str]] = field(default_factory=dict)
    tombstones: dict[int, int] = field(default_factory=dict)
    complete: bool = False

    def entries(self) -> list[ShardEntry]:
        return list(ShardRows(self.rows))


class Records:
    """The commit records of one plan that count.

    A record counts if it has its own name, carries this plan's spec digest, and is newer than the
    last tombstone of its shard: a record stores how many tombstones its shard had.

    Args:
        shards: number of shards of the plan.
        use_index: take records from the newest index where it has them; else read every record.
        heartbeat: called after each folder of a refresh, which is slow without an index.
    """

    def __init__(
        self,
        store: Store,
        plan_digest: str,
        *,
        shards: int,
        use_index: bool = True,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._plan, self._shards = store, plan_digest, shards
        self._heartbeat = heartbeat
        self._folders: dict[int, Folder] = {}
        self._use_index = use_index
        self._index: Index | None = None

    def refresh(self, start: int = 0, stop: int | None = None) -> None:
        """Read the records of these shards that are new; by default of all shards of the plan."""
        stop = self._shards if stop is None else min(stop, self._shards)
        numbers = set(range(start // PER_FOLDER, -(-stop // PER_FOLDER)))
        discarded = numbered_folders(self._store, DISCARDED) & numbers
        listed = numbered_folders(self._store, SHARDS) & numbers
        for number in numbers - listed:
            self._folders.pop(number, None)
        numbers = {n for n in listed if n in discarded or not self._folder(n).complete}
        if numbers and self._use_index and not self._folders.keys() & numbers:
            self._index = newest_index(self._store, self._plan)
        update = partial(self._updated_folder, discarded=discarded)
        for number, folder in zip(
            sorted(numbers),
            mapped(update, sorted(numbers), threads=self._store.parallel),
            strict=True,
        ):
            self._folders[number] = folder
            self._heartbeat()
        self._index = None  # it is large, and its rows are now in the folders

    def rows(self) -> ShardRows:
        """All shards of the plan that count, as of the last refresh."""
        folder_rows = [self._folders[number].rows for number in sorted(self._folders)]
        return ShardRows(np.concatenate([np.empty(0, ROW), *folder_rows])).between(0, self._shards)

    def missing(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Shards of the plan that do not count, as of the last refresh, ascending."""
        stop = self._shards if stop is None else min(stop, self._shards)
        is_missing = np.ones(max(0, stop - start), bool)
        is_missing[self.rows().between(start, stop).numbers - start] = False
        missing_shards: list[int] = (start + np.flatnonzero(is_missing)).tolist()
        return missing_shards

    def folders(self) -> dict[int, Folder]:
        """All folders by number; they may hold shards beyond the last of the plan."""
        return dict(sorted(self._folders.items()))

    def find(self, shard: int) -> CommitRecord | None:
        """The full record of one shard, read from the store; None if it does not count.

        Raises:
            InputError: a newer version of semix wrote it.
        """
        name = record_name(shard)
        try:
            record = self._checked(self._store.get(name, max_bytes=CommitRecord.MAX_BYTES), shard)
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return None
        return record if record.discards == discards_of(self._store, shard) else None

    def _folder(self, number: int) -> Folder:
        return self._folders.get(number) or Folder()

    def _updated_folder(self, number: int, *, discarded: Iterable[int]) -> Folder:
        before = self._folder(number)
        # Tombstones first: a shard discarded between the two listings shows at the next refresh.
        tombstones = discards(self._store, number) if number in discarded else {}
        if before.complete and tombstones == before.tombstones:
            return before
        infos = record_infos(self._store.scan(f"{SHARDS}/{number:04d}", suffix=".json")[0])
        known = {int(row["shard"]): row for row in self._index_rows(number)}
        known |= {int(row["shard"]): row for row in before.rows}
        unchanged = {
            shard: known[shard]
            for shard, info in infos.items()
            if shard in known and _is_current(known[shard], info, tombstones)
        }
        rejected = {s: reason for s, reason in before.rejected.items() if reason[0] == infos.get(s)}
        if tombstones != before.tombstones:
            rejected = {}
        unread = [s for s in infos if s not in unchanged and s not in rejected]
        read_rows, newly_rejected = self._read(unread, infos, tombstones)
        rows = _with_times([*unchanged.values(), *read_rows.array], infos)
        planned = min(PER_FOLDER, self._shards - number * PER_FOLDER)
        complete = int((rows["shard"] < self._shards).sum()) == planned
        return Folder(rows, rejected | newly_rejected, tombstones, complete)

    def _read(
        self, shards: Sequence[int], infos: Mapping[int, FileInfo], tombstones: Mapping[int, int]
    ) -> tuple[ShardRows, dict[int, tuple[FileInfo, str]]]:
        """The records that count, and why others do not; deleted records are in neither."""
        max_bytes, entries, rejected = CommitRecord.MAX_BYTES, [], {}
        for shard in shards:
            if infos[shard].bytes > max_bytes:
                rejected[shard] = infos[shard], f"has {infos[shard].bytes} bytes, far too many"
        names = {record_name(shard): shard for shard in shards if shard not in rejected}
        for name, content in self._store.get_many(names, max_bytes=max_bytes).items():
            shard = names[name]
            try:
                record = self._checked(content, shard)
                if record.discards != tombstones.get(shard, 0):
                    raise ValueError("was discarded and is still there")
            except ValueError as error:
                rejected[shard] = infos[shard], str(error)
                continue
            entries.append(record.entry(len(content)))
        return ShardRows.of(entries), rejected

    def _checked(self, content: bytes, shard: int) -> CommitRecord:
        record = CommitRecord.read(content, where=f"{self._store.url}/{record_name(shard)}")
        if record.shard != shard:
            raise ValueError(f"is the record of shard {record.shard}")
        if record.spec != spec_digest(self._plan, shard):
            raise ValueError("belongs to another plan")
        return record

    def _index_rows(self, number: int) -> np.ndarray:
        if self._index is None:
            return np.empty(0, ROW)
        start = number * PER_FOLDER
        return self._index.rows.between(start, start + PER_FOLDER).array


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


def discards(store: Store, folder: int) -> dict[int, int]:
    """The number of the last tombstone of each shard in one folder that was discarded before."""
    last_tombstones: dict[int, int] = {}
    for shard, number in Attempts(store, DISCARDED)._listed(folder):
        last_tombstones[shard] = max(last_tombstones.get(shard, 0), number)
    return last_tombstones


def discards_of(store: Store, shard: int) -> int:
    return discards(store, shard // PER_FOLDER).get(shard, 0)


def discard_record(store: Store, shard: int, *, why: str) -> None:
    """Remove a commit record, so that the shard counts as missing and is made again.

    A tombstone keeps the reason and the record's text. It is written first: from then on neither
    the record nor its row in an index counts.
    """
    name = record_name(shard)
    try:
        content_text = store.get(name, max_bytes=CommitRecord.MAX_BYTES).decode(
            "utf-8", errors="replace"
        )
    except FileNotFoundError:
        return
    except TooLarge as error:
        content_text = str(error)
    content = Tombstone(shard=shard, why=why, record=content_text).written(indent=1)
    number = 1 + discards_of(store, shard)
    while not store.create(attempt_name(shard, number, DISCARDED), content):
        number += 1
    store.delete(name)


def numbered_folders(store: Store, parent: str) -> set[int]:
    """Numbers of the folders below `parent`, each of which is for a thousand shards."""
    matches = (re.fullmatch(rf"{parent}/(\d{{4}})", name) for name in store.scan(parent)[1])
    return {int(match[1]) for match in matches if match}


def _is_current(row: np.void, info: FileInfo, tombstones: Mapping[int, int]) -> bool:
    """Whether a row matches the listed file; rows that come from an index have no time."""
    same_time = row["modified"] in (0.0, info.modified)
    same_count = row["discards"] == tombstones.get(int(row["shard"]), 0)
    return bool(same_time and same_count and row["record_bytes"] == info.bytes)


def _with_times(rows: Sequence[np.void], infos: Mapping[int, FileInfo]) -> np.ndarray:
    """These rows in ascending order, with the times at which their records were written."""
    ascending = np.array(list(rows), ROW)
    ascending = ascending[np.argsort(ascending["shard"])]
    ascending["modified"] = [infos[shard].modified for shard in ascending["shard"].tolist()]
    return ascending
