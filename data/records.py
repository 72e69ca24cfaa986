"""Commit records: found by listing, read in parallel, never twice; indices stand for them."""

import logging
import re
from typing import Any

from data.fingerprint import fingerprint
from data.schemas import MOST_RECORD, read_commit_record, read_index
from data.shards import shard_name
from data.store import Fact, Store

Record = dict[str, Any]

RECORD = re.compile(r"shards/\d{4}/(\d{7})\.json")
DISCARD = re.compile(r"discarded/\d{4}/(\d{7})\.(\d+)\.json")
INDEX = re.compile(r"index/(\d+)\.json")
# What progress, readers and indices want of a commit record; a million of them stay in memory.
KEPT = (
    *("shard", "tar", "sha256", "bytes", "groups", "first", "features", "attempt"),
    *("seconds", "wall_seconds", "tflop", "prototypes", "discards", "record_bytes"),
)
AT_ONCE = 1000  # records read before they are reduced to what is kept

log = logging.getLogger("semix.root")


class Records:
    """The commit records that count, of one plan.

    A record counts if it is in its place, carries this plan's spec digest, and was written after
    the last time its shard was discarded. That is told by numbers, not by a clock: a shard's
    tombstones are numbered, and a record says how many there were.

    Attributes:
        damaged: why listed records do not count, by name, as of the last look.
        compact: take from the newest index what it knows; else every record is read.
    """

    def __init__(self, store: Store, plan_digest: str, *, compact: bool = True) -> None:
        self.damaged: dict[str, str] = {}
        self._store = store
        self._plan = plan_digest
        self._known: dict[int, Record] = {}
        self._facts: dict[int, Fact] = {}  # of the record files that were read
        self._refused: dict[int, str] = {}
        self._unread_index = compact

    def committed(self) -> dict[int, Record]:
        """What is kept of each record that counts, by shard, ascending."""
        gone = discards(self._store)
        if self._unread_index:
            self._known |= self._from_index()
            self._unread_index = False
        listed = _records(self._store.facts("shards"))
        unread = [shard for shard, fact in listed.items() if self._is_news(shard, fact, gone)]
        for start in range(0, len(unread), AT_ONCE):
            self._read(unread[start : start + AT_ONCE], listed)
        self.damaged = {}
        counting = [shard for shard in sorted(listed) if self._counts(shard, gone)]
        return {shard: self._known[shard] for shard in counting}

    def find(self, shard: int) -> Record | None:
        """The whole record of one shard, read now; None if it does not count."""
        name = record_name(shard)
        try:
            record = read_record(self._store.get(name), name, plan_digest=self._plan)
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return None
        count = discards(self._store, shard).get(shard, 0)
        return record if record.get("discards", 0) == count else None

    def forget(self, shard: int) -> None:
        """Read its record again when it is listed next."""
        for memory in (self._known, self._facts, self._refused):
            memory.pop(shard, None)

    def _is_news(self, shard: int, fact: Fact, gone: dict[int, int]) -> bool:
        """Whether a listed record must be read: it is not known, or not known to count."""
        if shard in self._facts:
            return fact != self._facts[shard]
        known = self._known.get(shard)
        return (
            known is None
            or known["discards"] != gone.get(shard, 0)
            or known["record_bytes"] != fact.bytes
        )

    def _counts(self, shard: int, gone: dict[int, int]) -> bool:
        known = self._known.get(shard)
        if known is not None and known["discards"] == gone.get(shard, 0):
            return True
        reason = self._refused.get(shard, "was discarded and is still there")
        if known is not None or shard in self._refused:
            self.damaged[record_name(shard)] = reason
        return False

    def _read(self, shards: list[int], listed: dict[int, Fact]) -> None:
        wanted = [shard for shard in shards if listed[shard].bytes <= MOST_RECORD]
        contents = self._store.get_many([record_name(shard) for shard in wanted])
        for shard in shards:
            self.forget(shard)
            if listed[shard].bytes > MOST_RECORD:
                self._refused[shard] = f"has {listed[shard].bytes} bytes, far too many"
                self._facts[shard] = listed[shard]
            elif record_name(shard) in contents:  # else it was discarded since it was listed
                self._learn(shard, contents[record_name(shard)])
                self._facts[shard] = listed[shard]

    def _learn(self, shard: int, content: bytes) -> None:
        try:
            record = read_record(content, record_name(shard), plan_digest=self._plan)
        except ValueError as error:
            self._refused[shard] = str(error)
        else:
            self._known[shard] = kept(record, len(content))

    def _from_index(self) -> dict[int, Record]:
        for name in reversed(index_names(self._store)):
            try:
                index = open_index(self._store, name, plan_digest=self._plan)
            except ValueError as error:
                log.warning("%s; its records are read instead", error)
                continue
            return {entry["shard"]: _completed(entry) for entry in index["shards"]}
        return {}


def record_name(shard: int) -> str:
    return f"{shard_name(shard)}.json"


def spec_digest(plan_digest: str, shard: int) -> str:
    """What a commit record must carry to count: this plan and this shard."""
    return fingerprint([plan_digest, shard])


def read_record(content: bytes, name: str, *, plan_digest: str) -> Record:
    """A commit record. Raises ValueError if it is damaged, misplaced, or of another plan."""
    record = read_commit_record(content)
    if record_name(record["shard"]) != name:
        raise ValueError(f"is the record of shard {record['shard']}")
    if record["spec"] != spec_digest(plan_digest, record["shard"]):
        raise ValueError("belongs to another plan")
    return record


def kept(record: Record, size: int) -> Record:
    """What is kept in memory, and in an index, of a record of `size` bytes."""
    reduced = _completed({key: record[key] for key in KEPT if key in record})
    seconds = {stage: round(value, 3) for stage, value in record["seconds"].items()}
    return {**reduced, "seconds": seconds, "record_bytes": size}


def discards(store: Store, shard: int | None = None) -> dict[int, int]:
    """How often shards were discarded, by shard: the number of its last tombstone."""
    folder = "discarded" if shard is None else f"discarded/{shard // 1000:04d}"
    found: dict[int, int] = {}
    for name in store.list(folder):
        if match := DISCARD.fullmatch(name):
            number = int(match[1])
            found[number] = max(found.get(number, 0), int(match[2]))
    return found


def index_names(store: Store) -> list[str]:
    """Names of the indices, oldest first."""
    found = (INDEX.fullmatch(name) for name in store.list("index"))
    return [match[0] for match in sorted(filter(None, found), key=lambda m: int(m[1]))]


def open_index(store: Store, name: str, *, plan_digest: str) -> Record:
    """An index of this plan. Raises ValueError if it is damaged, or of another plan."""
    try:
        index = read_index(store.get(name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if index["plan"] != plan_digest:
        raise ValueError(f"{name}: belongs to another plan")
    return index


def _completed(entry: Record) -> Record:
    return {"discards": 0, "record_bytes": 0, **entry}


def _records(facts: dict[str, Fact]) -> dict[int, Fact]:
    found = ((RECORD.fullmatch(name), fact) for name, fact in facts.items())
    return {
        int(match[1]): fact
        for match, fact in found
        if match and record_name(int(match[1])) == match[0]
    }
