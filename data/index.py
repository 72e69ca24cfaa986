"""Indices: `index/N.json` lists shards, one per line; a training run pins one index."""

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from functools import cached_property, reduce
from typing import Any

import numpy as np
from pydantic import Field, RootModel

from semix.data.formats import (
    INDICES,
    MIB,
    STAGES,
    Digest,
    File,
    ShardEntry,
    StoredFile,
    features_name,
    refuse_newer,
    tar_name,
)
from semix.data.store import Store
from semix.data.strict_json import read_strictly

INDEX = re.compile(rf"{INDICES}/(\d{{1,9}})\.json")
MAX_BYTES = 2048 * MIB  # bytes; a million shards take some 600 MiB
LINES_AT_A_TIME = 1000  # that are parsed together, which bounds memory
ROW = np.dtype(
    [
        *((name, "i4") for name in ("shard", "groups")),
        *((name, "i8") for name in ("attempt", "discards", "record_bytes")),
        *((name, "i8") for name in ("bytes", "first", "features_bytes")),
        *((name, "S64") for name in ("sha256", "features_sha256", "prototypes", "pairs")),
        *((name, "f8") for name in ("wall_seconds", "tflop", "modified")),
        ("seconds", "f8", (len(STAGES),)),
        ("left_out", "O"),
    ]
)

log = logging.getLogger("semix.root")


class ShardRows:
    """Shards as rows of one array, ascending: a million of them in half a gigabyte.

    A row also has the time of its commit record, if that was listed, else 0.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def of(cls, entries: Iterable[ShardEntry]) -> "ShardRows":
        """The rows of entries in any order; the last entry of a shard counts."""
        rows = np.array([_row(entry) for entry in entries], ROW)
        _, last = np.unique(rows["shard"][::-1], return_index=True)
        return cls(rows[::-1][last])

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[ShardEntry]:
        return map(_entry, self.array)

    @property
    def numbers(self) -> np.ndarray:
        """Shard numbers, int32 ascending."""
        return self.array["shard"]

    def images(self) -> dict[int, str]:
        """SHA-256 of the tar of each shard."""
        hashes = (digest.decode() for digest in self.array["sha256"].tolist())
        return dict(zip(self.numbers.tolist(), hashes, strict=True))

    def find(self, shard: int) -> ShardEntry | None:
        row = int(np.searchsorted(self.numbers, shard))
        present = row < len(self) and self.numbers[row] == shard
        return _entry(self.array[row]) if present else None

    def between(self, start: int, stop: int) -> "ShardRows":
        """The rows from shard `start` up to, not including, `stop`."""
        first, last = np.searchsorted(self.numbers, [start, stop])
        return ShardRows(self.array[first:last])

    @cached_property
    def digest(self) -> str:
        """Identity of images, labels and features; it does not depend on when they were made."""
        columns = (self.array[name] for name in ("shard", "sha256", "features_sha256"))
        return reduce(_update_hash, columns, hashlib.sha256()).hexdigest()


class Index:
    """An index of a root.

    Attributes:
        digest: identity of the shards that it pins.
    """

    def __init__(self, name: str, plan: str, rows: ShardRows) -> None:
        self.name, self.plan, self.rows, self.digest = name, plan, rows, rows.digest

    def shards(self) -> list[ShardEntry]:
        """The entries of all shards, ascending."""
        return list(self.rows)


def index_names(store: Store) -> list[str]:
    """Names of the indices, oldest first."""
    matches = (INDEX.fullmatch(name) for name in store.scan(INDICES, suffix=".json")[0])
    return [match[0] for match in sorted(filter(None, matches), key=lambda m: int(m[1]))]


def open_index(store: Store, name: str, *, plan_digest: str | None = None) -> Index:
    """Read an index, which must be of this plan if one is given.

    Raises:
        ValueError: it is damaged, or of another plan.
        InputError: a newer version of semix wrote it.
        FileNotFoundError: there is no such index.
    """
    content = store.get(name, max_bytes=MAX_BYTES)
    try:
        plan, rows = read_index(content, where=f"{store.url}/{name}")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if plan_digest not in (None, plan):
        raise ValueError(f"{name}: belongs to another plan")
    return Index(name, plan, rows)


def newest_index(store: Store, plan_digest: str) -> Index | None:
    """The newest readable index of this plan; unreadable ones are skipped with a warning."""
    for name in reversed(index_names(store)):
        try:
            return open_index(store, name, plan_digest=plan_digest)
        except ValueError as error:
            log.warning("%s; its records are read instead", error)
    return None


def write_index(store: Store, rows: ShardRows, *, plan: str) -> str:
    """Write an index of these shards; returns its name, or the newest index if that is equal."""
    names = index_names(store)
    content = index_text(plan, rows)
    if (
        names
        and store.size(names[-1]) == len(content)
        and store.get(names[-1], max_bytes=MAX_BYTES) == content
    ):
        return names[-1]
    number = 1 + _number(names[-1]) if names else 0  # never by count: readers pin by name
    while not store.create(f"{INDICES}/{number}.json", content):
        number += 1
    return f"{INDICES}/{number}.json"


def _number(name: str) -> int:
    return int(name.removeprefix(f"{INDICES}/").removesuffix(".json"))


class _FirstLine(StoredFile):
    """The first line of an index, which names a newer version, if any."""

    WHAT = "index"

    plan: Digest
    shards: list[Any] = Field(max_length=0)  # empty: the entries follow from the next line on


class _Entries(RootModel[list[ShardEntry]]):
    pass


def index_text(plan: str, rows: ShardRows) -> bytes:
    lines = b",\n".join(entry.written() for entry in rows)
    return b'{"plan":"%s","shards":[\n%s\n]}\n' % (plan.encode(), lines)


def read_index(content: bytes, *, where: str = "") -> tuple[str, ShardRows]:
    """The plan's digest, and the shards.

    Args:
        where: path or URL of the file, for the error about a newer version.
    Raises:
        ValueError: `index: field: problem`; InputError: a newer version of semix wrote it.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"index: {len(content)} bytes, at most {MAX_BYTES} are read")
    # By offsets, because half a gigabyte, as of a million shards, should not be copied.
    start, end = content.find(b"\n") + 1, content.rfind(b"\n]}")
    if end < start or content[end + 3 :].strip():
        raise ValueError("index: it has bytes after its end, or is cut")
    plan = _FirstLine.read(content[:start] + b"]}", where=where).plan
    array, count = np.empty(content.count(b"\n", start, end) + 1, ROW), 0
    for block in _line_blocks(content, start, end):
        parsed = _entries(block, where)
        array[count : count + len(parsed)] = parsed  # a ValueError if a line holds several entries
        count += len(parsed)
    rows = ShardRows(array[:count])
    if (np.diff(rows.numbers) <= 0).any():
        raise ValueError("index: shards do not ascend")
    return plan, rows


def _line_blocks(content: bytes, start: int, end: int) -> Iterator[bytes]:
    """Blocks of `LINES_AT_A_TIME` lines, without the comma at the end."""
    while start < end:
        stop = start
        for _ in range(LINES_AT_A_TIME):
            stop = content.find(b"\n", stop, end) + 1
            if not stop:
                stop = end + 1
                break
        yield content[start : stop - 1].rstrip(b",")
        start = stop


def _entries(lines: bytes, where: str) -> np.ndarray:
    refuse_newer(ShardEntry, lines.partition(b"\n")[0].rstrip(b","), where=where)
    content = b"[" + lines + b"]"
    entries = read_strictly(_Entries, content, what="index", max_bytes=len(content)).root
    return np.array([_row(entry) for entry in entries], ROW)


def _row(entry: ShardEntry) -> tuple[Any, ...]:
    tflop = np.nan if entry.tflop is None else entry.tflop
    return (
        *(entry.shard, entry.groups, entry.attempt, entry.discards, entry.record_bytes),
        *(entry.bytes, entry.first, entry.features.bytes),
        *(entry.sha256, entry.features.sha256, entry.prototypes, entry.pairs),
        *(entry.wall_seconds, tflop, 0.0),
        tuple(entry.seconds.get(stage, 0.0) for stage in STAGES),
        entry.left_out,
    )


def _entry(row: np.void) -> ShardEntry:
    values = dict(zip(ROW.names or (), row.tolist(), strict=True))
    hashes = ("sha256", "features_sha256", "prototypes", "pairs")
    values |= {name: values[name].decode() for name in hashes}
    shard, features = values["shard"], values.pop("features_sha256")
    seconds = dict(zip(STAGES, values["seconds"].tolist(), strict=True))
    values["seconds"] = {stage: value for stage, value in seconds.items() if value}
    values["tflop"] = None if np.isnan(values["tflop"]) else values["tflop"]
    del values["modified"]
    file = File.model_construct(
        name=features_name(shard, features), sha256=features, bytes=values.pop("features_bytes")
    )
    tar = tar_name(shard, values["sha256"])
    return ShardEntry.model_construct(**values, tar=tar, features=file)


def _update_hash(digest: Any, column: np.ndarray) -> Any:
    digest.update(np.ascontiguousarray(column).tobytes())
    return digest
