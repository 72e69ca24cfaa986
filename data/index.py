"""Indices: `index/N.json` lists shards, one per line; a training run pins one index."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import Field, RootModel

from semix.data.formats import (
    INDICES,
    MIB,
    Digest,
    MaybeSha256,
    ShardEntry,
    StoredFile,
    refuse_newer,
)
from semix.data.store import Store
from semix.data.strict_json import read_strictly

INDEX = re.compile(rf"{INDICES}/(\d{{1,9}})\.json")
MAX_BYTES = 2048 * MIB  # bytes; a million shards take some 450 MiB
LINES_AT_A_TIME = 1000  # that are parsed together, which bounds memory


@dataclass(frozen=True)
class Index:
    """An index of a root.

    Attributes:
        plan: digest of the plan.
        prototypes: SHA-256 of the prototypes that all labels were made with; empty if not recorded.
        shards: what it pins, ascending.
    """

    name: str
    plan: str
    prototypes: str
    shards: list[ShardEntry]

    @cached_property
    def digest(self) -> str:
        """Identity of images, labels and features; it does not depend on when they were made."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard.shard} {shard.sha256} {shard.features.sha256}\n".encode())
        return digest.hexdigest()


def index_names(store: Store) -> list[str]:
    """Names of the indices, oldest first."""
    matches = (INDEX.fullmatch(name) for name in store.scan(INDICES, suffix=".json")[0])
    return [match[0] for match in sorted(filter(None, matches), key=lambda m: int(m[1]))]


def open_index(store: Store, name: str) -> Index:
    """Read an index.

    Raises:
        ValueError: it is damaged.
        InputError: a newer version of semix wrote it.
        FileNotFoundError: there is no such index.
    """
    content = _content(store, name)
    try:
        header, shards = read_index(content, where=f"{store.url}/{name}")
        return Index(name, header.plan, header.prototypes, list(shards))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def iterate_index(store: Store, name: str, *, plan_digest: str) -> Iterator[ShardEntry]:
    """Yield what an index of this plan pins, with a thousand shards in memory.

    Raises:
        ValueError: it is of another plan or damaged, possibly after the first shards.
        InputError, FileNotFoundError: as `open_index`.
    """
    content = _content(store, name)
    try:
        header, shards = read_index(content, where=f"{store.url}/{name}")
        if header.plan != plan_digest:
            raise ValueError("belongs to another plan")
        yield from shards
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def write_index(store: Store, content: bytes) -> str:
    """Write an index with this content; returns its name, or that of the newest if it is equal."""
    names = index_names(store)
    if names and store.size(names[-1]) == len(content) and _content(store, names[-1]) == content:
        return names[-1]
    number = 1 + _number(names[-1]) if names else 0  # never by count: readers pin by name
    while not store.create(f"{INDICES}/{number}.json", content):
        number += 1
    return f"{INDICES}/{number}.json"


def _content(store: Store, name: str) -> bytes:
    return store.get(name, max_bytes=MAX_BYTES)


def _number(name: str) -> int:
    return int(name.removeprefix(f"{INDICES}/").removesuffix(".json"))


class Header(StoredFile):
    """The first line of an index, which names a newer version, if any."""

    WHAT = "index"

    plan: Digest
    prototypes: MaybeSha256 = ""
    shards: list[Any] = Field(max_length=0)  # empty: the entries follow from the next line on


class _Entries(RootModel[list[ShardEntry]]):
    pass


def index_text(plan: str, shards: Iterable[bytes], *, prototypes: str = "") -> bytes:
    """The content of an index.

    Args:
        shards: each entry as it is written, ascending.
    """
    content = bytearray(b'{"plan":"%s"' % plan.encode())
    content += b',"prototypes":"%s"' % prototypes.encode() if prototypes else b""
    content += b',"shards":[\n' + b",\n".join(shards) + b"\n]}\n"
    return bytes(content)


def read_index(content: bytes, *, where: str = "") -> tuple[Header, Iterator[ShardEntry]]:
    """The first line, and the entries, which are parsed while they are iterated.

    Args:
        where: path or URL of the file, for the error about a newer version.
    Raises:
        ValueError: `index: field: problem`; InputError: a newer version of semix wrote it. Both
            also while iterating.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"index: {len(content)} bytes, at most {MAX_BYTES} are read")
    # By offsets, because half a gigabyte, as of a million shards, should not be copied.
    start, end = content.find(b"\n") + 1, content.rfind(b"\n]}")
    if end < start or content[end + 3 :].strip():
        raise ValueError("index: it has bytes after its end, or is cut")
    header = Header.read(content[:start] + b"]}", where=where)
    return header, _entries(content, start, end, where=where)


def _entries(content: bytes, start: int, end: int, *, where: str) -> Iterator[ShardEntry]:
    last = -1
    for lines in _line_blocks(content, start, end):
        for entry in _parsed(lines, where):
            if entry.shard <= last:
                raise ValueError("index: shards do not ascend")
            last = entry.shard
            yield entry


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


def _parsed(lines: bytes, where: str) -> list[ShardEntry]:
    refuse_newer(ShardEntry, lines.partition(b"\n")[0].rstrip(b","), where=where)
    content = b"[" + lines + b"]"
    return read_strictly(_Entries, content, what="index", max_bytes=len(content)).root
