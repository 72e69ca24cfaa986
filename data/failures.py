"""Attempts that failed: `failed/0012/0012345.N.json`, one file an attempt."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from data.schemas import PER_FOLDER, read_failure
from data.shard_numbers import ShardNumbers
from data.shards import shard_name
from data.store import Store
from data.threads import mapped
from data.tombstones import numbered_folders

FOLDER = "failed"
NAME = re.compile(r"failed/\d{4}/(\d{7})\.(\d{1,9})\.json")
GROUP = re.compile(r"\bgroup (\d+)\b")
MOST_MESSAGE = 10_000  # characters, so that what is written can be read back
AT_ONCE = 256  # shards whose attempts are read together
Record = dict[str, Any]

_NONE = np.empty((0, 2), np.int32)

log = logging.getLogger("semix.root")


class Attempts(Sequence[Record]):
    """Records of the attempts at one shard that failed; to count them none is read."""

    def __init__(self, store: Store, shard: int, numbers: Sequence[int]) -> None:
        self._store, self._shard, self._numbers = store, shard, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Record]:
        return iter(_readable(self._store, {self._shard: self._numbers})[self._shard])

    @overload
    def __getitem__(self, place: int) -> Record: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Record]: ...
    def __getitem__(self, place: int | slice) -> Record | Sequence[Record]:
        return list(self)[place]


class FailedShards(Mapping[int, Attempts]):
    """Attempts at shards that are still missing, by shard, ascending; eight bytes each."""

    def __init__(self, store: Store, found: np.ndarray) -> None:
        """found: int32 [attempts, 2], shard and number, ascending."""
        self._store, self._found = store, found
        self.shards = ShardNumbers(found[:, 0])

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[int]:
        return iter(self.shards)

    def __contains__(self, shard: object) -> bool:
        return shard in self.shards

    def __getitem__(self, shard: int) -> Attempts:
        if shard not in self.shards:
            raise KeyError(shard)
        return Attempts(self._store, shard, self._numbers(shard))

    def read(self) -> Iterator[tuple[int, list[Record]]]:
        """All attempts, many shards read at once."""
        for start in range(0, len(self), AT_ONCE):
            some = {shard: self._numbers(shard) for shard in self.shards[start : start + AT_ONCE]}
            yield from _readable(self._store, some).items()

    def _numbers(self, shard: int) -> list[int]:
        first, last = np.searchsorted(self._found[:, 0], [shard, shard + 1])
        numbers: list[int] = self._found[first:last, 1].tolist()
        return numbers


class Failures:
    """The attempt records of one root."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def of_missing(self, missing: ShardNumbers) -> FailedShards:
        """Attempts at these shards; folders that hold others alone are not listed."""
        there = numbered_folders(self._store, FOLDER)
        folders = [n for n in np.unique(missing.array // PER_FOLDER).tolist() if n in there]
        listed = mapped(self._listed, folders, threads=self._store.parallel)
        found = (some[np.isin(some[:, 0], missing.array)] for some in listed)
        return FailedShards(self._store, np.concatenate([_NONE, *found]))

    def attempts(self, shard: int) -> int:
        """The number of the last attempt at a shard that failed; 0 if none did."""
        listed = self._listed(shard // PER_FOLDER)
        return int(listed[listed[:, 0] == shard, 1].max(initial=0))

    def add(self, shard: int, error: Record) -> None:
        """Write down the next attempt; two at once take two numbers."""
        error = {**error, "message": error["message"][:MOST_MESSAGE]}
        attempt = 1 + self.attempts(shard)
        while not self._store.create(
            failure_name(shard, attempt),
            json.dumps({"shard": shard, "attempt": attempt, **error}, indent=1).encode(),
        ):
            attempt += 1

    def _listed(self, folder: int) -> np.ndarray:
        """Shard and number of each attempt, ascending; int32 [attempts, 2]."""
        names = self._store.scan(f"{FOLDER}/{folder:04d}", suffix=".json")[0]
        found = (NAME.fullmatch(name) for name in names)
        pairs = ((int(match[1]), int(match[2])) for match in found if match)
        in_place = sorted(pair for pair in pairs if pair[0] // PER_FOLDER == folder)
        return np.array(in_place, np.int32).reshape(-1, 2)


def failure_name(shard: int, attempt: int) -> str:
    return f"{shard_name(shard).replace('shards', FOLDER, 1)}.{attempt}.json"


def failed_group(failure: Record) -> int | None:
    """The series an attempt failed at, if its record or its message names one."""
    if "group" in failure:
        group: int = failure["group"]
        return group
    named = GROUP.search(failure["message"])
    return int(named[1]) if named else None


def _readable(store: Store, wanted: Mapping[int, Iterable[int]]) -> dict[int, list[Record]]:
    """The records of attempts by shard; at least one of each shard, in place of damaged ones."""
    names = {failure_name(s, number): s for s, numbers in wanted.items() for number in numbers}
    found: dict[int, list[Record]] = {shard: [] for shard in wanted}
    problems: dict[int, Record] = {}
    contents = store.get_many(names)
    for name, shard in names.items():
        try:
            if name not in contents:
                raise ValueError("its record is gone")
            found[shard].append(read_failure(contents[name]))
        except ValueError as error:
            log.warning("%s: %s", name, error)
            attempt = int(name.split(".")[-2])
            facts = {"error": "unknown", "message": f"{name}: {error}", "time": 0.0}
            problems[shard] = {"shard": shard, "attempt": attempt, **facts}
    return {shard: records or [problems[shard]] for shard, records in found.items()}
