"""Attempts that failed: `failed/0012/0012345.N.json`, one file an attempt."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Container
from typing import Any

from data.schemas import read_failure
from data.shards import shard_name
from data.store import Store

NAME = re.compile(r"failed/\d{4}/(\d{7})\.(\d+)\.json")
GROUP = re.compile(r"\bgroup (\d+)\b")
MOST_MESSAGE = 10_000  # characters, so that what is written can be read back
Record = dict[str, Any]

log = logging.getLogger("semix.root")


class Failures:
    """The attempt records of one root, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, Record | None] = {}  # None where one cannot be read

    def of_missing(self, done: Container[int]) -> dict[int, list[Record]]:
        """Attempts at shards that are not done, by shard, in order."""
        names = {
            name: (int(match[1]), int(match[2]))
            for name in self._store.list("failed")
            if (match := NAME.fullmatch(name)) and int(match[1]) not in done
        }
        self._learn([name for name in names if name not in self._read])
        found = defaultdict(list)
        for name, (shard, _) in sorted(names.items(), key=lambda item: item[1]):
            if record := self._read.get(name):
                found[shard].append(record)
        return dict(found)

    def attempts(self, shard: int) -> int:
        """The number of the last attempt at a shard that failed; 0 if none did."""
        found = (NAME.fullmatch(name) for name in self._store.list(f"failed/{shard // 1000:04d}"))
        return max(
            (int(match[2]) for match in found if match and int(match[1]) == shard), default=0
        )

    def add(self, shard: int, error: Record) -> None:
        """Write down the next attempt; two at once take two numbers."""
        error = {**error, "message": error["message"][:MOST_MESSAGE]}
        stem, attempt = shard_name(shard).replace("shards", "failed", 1), 1 + self.attempts(shard)
        while not self._store.create(
            f"{stem}.{attempt}.json",
            json.dumps({"shard": shard, "attempt": attempt, **error}, indent=1).encode(),
        ):
            attempt += 1

    def _learn(self, names: list[str]) -> None:
        for name, content in self._store.get_many(names).items():
            try:
                self._read[name] = read_failure(content)
            except ValueError as error:
                log.warning("%s: %s", name, error)
                self._read[name] = None


def failed_group(failure: Record) -> int | None:
    """The series an attempt failed at, if its record or its message names one."""
    if "group" in failure:
        group: int = failure["group"]
        return group
    named = GROUP.search(failure["message"])
    return int(named[1]) if named else None
