"""A mixed dataset's root: its plan, commit records, failures and index; what is done."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cached_property
from hashlib import sha256

from data import verification
from data.commit_records import Record, record_name, spec_digest
from data.errors import InputError
from data.extension import Extension, Layout, layout_of, read_extensions
from data.failures import FailedShards, Failures
from data.index_writer import write_index
from data.indices import index_names
from data.progress import Progress, progress_of
from data.records import Records
from data.schemas import SCHEMA, read_plan
from data.shard_numbers import ShardNumbers
from data.shards import shard_name
from data.store import Store
from data.sums import Sums
from data.tombstones import discards_of
from data.verification import Problem
from data.verification.prototypes import PROTOTYPES

__all__ = ["FIDELITY", "PLAN", "PROTOTYPES", "SCHEMA", "Problem", "Record", "Root", "spec_digest"]

PLAN = "plan.json"
FIDELITY = "fidelity.json"  # only where the images are approximate


class Root:
    """An existing root, read from the store alone.

    Attributes:
        plan: what plan.json holds; its numbers of groups and shards are those of today, with
            what `extensions` added.
        beat: called after each folder that is looked at, for whoever watches that work goes on.
    Raises:
        InputError: there is no plan.json, it is damaged, or another version of semix wrote it.
    """

    def __init__(self, url: str, *, beat: Callable[[], None] = lambda: None) -> None:
        self.beat = beat
        self.store = Store(url)
        self.url = self.store.url
        self.plan: Record = _read_plan(self.store)
        self.extensions: list[Extension] = read_extensions(self.store, self.plan)
        self._written = dict(self.plan)
        if self.extensions:
            self.plan["num_groups"] = self.layout.num_groups
            self.plan["num_shards"] = self.layout.num_shards
        digest, shards = self.plan["digest"], self.plan["num_shards"]
        self._records = Records(self.store, digest, shards=shards, beat=beat)
        self._failures = Failures(self.store)

    @cached_property
    def layout(self) -> Layout:
        """Which groups are in which shard."""
        return layout_of(self._written, self.extensions)

    def folders(self) -> Iterator[dict[int, Record]]:
        """What is kept of this plan's commit records, by shard: a thousand shards at a time."""
        last = self.plan["num_shards"]
        for _, found in self._records.folders():
            yield {shard: record for shard, record in found.items() if shard < last}

    def committed(self) -> dict[int, Record]:
        """All of `folders` at once, which takes kilobytes a shard; all else counts as missing."""
        return {shard: record for found in self.folders() for shard, record in found.items()}

    def folder(self, number: int, *, only: Iterable[int] | None = None) -> dict[int, Record]:
        """Of `folders` the one with shards from 1000 x `number` on, read now; or `only` some."""
        found = self._records.read_folder(number, only=only)[0]
        return {s: record for s, record in found.items() if s < self.plan["num_shards"]}

    def is_committed(self, shard: int) -> bool:
        return self._records.find(shard) is not None

    def record(self, shard: int) -> Record | None:
        """The whole commit record of a shard; None if it is missing."""
        return self._records.find(shard)

    def done(self) -> ShardNumbers:
        """Shards that are committed; all others are missing."""
        self._records.look()
        return self._records.done()

    def missing(self, start: int = 0, stop: int | None = None) -> ShardNumbers:
        """Shards that are not committed, ascending; from `start` up to, not including, `stop`.

        Only the folders that these are in are looked at.
        """
        self._records.look(start, stop)
        return self._records.missing(start, stop)

    def failures(self) -> FailedShards:
        """Attempts that failed, of shards that are still missing; read when they are asked for."""
        return self._failures.of_missing(self.missing())

    def sums(self) -> Sums:
        """Over the committed shards."""
        self._records.look()
        return self._records.sums()

    def seen(self) -> dict[int, tuple[str, int]]:
        """By folder a digest of what is listed, which says when to read it again, and how many
        shards are committed there."""
        self._records.look()
        return self._records.seen()

    def attempts(self, shard: int) -> int:
        """How many attempts at a shard failed."""
        return self._failures.attempts(shard)

    def progress(self) -> Progress:
        sums = self.sums()
        failed = self._failures.of_missing(self._records.missing())
        return progress_of(self.plan, sums, failed=len(failed))

    def commit(self, record: Record) -> bool:
        """Publish a commit record, last; False if the shard is committed already."""
        shard = record["shard"]
        name, count = record_name(shard), discards_of(self.store, shard)
        if count:
            record = {**record, "discards": count}
        content = json.dumps(record, indent=1, sort_keys=True).encode()
        if self.store.create(name, content):
            return True
        if self.is_committed(shard):
            return False
        self.store.put(name, content)  # what stood there was damaged or of another plan
        return True

    def record_failure(self, shard: int, error: Record) -> None:
        """Write `failed/...N.json` for the next free attempt number N."""
        self._failures.add(shard, error)

    def discard(self, shard: int, *, why: str = "") -> None:
        """Remove a commit record, so that the shard counts as missing and is made again.

        A tombstone says why, and what the record said. It comes first: from then on neither the
        record nor an index that knows it counts.
        """
        name = record_name(shard)
        try:
            content = self.store.get(name)
        except FileNotFoundError:
            return
        said = content.decode("utf-8", errors="replace")
        note = {"shard": shard, "why": why, "record": said}
        stem, number = shard_name(shard).replace("shards", "discarded", 1), 1
        number += discards_of(self.store, shard)
        while not self.store.create(f"{stem}.{number}.json", json.dumps(note, indent=1).encode()):
            number += 1
        self.store.delete(name)

    def write_index(self) -> str:
        """Pin the committed shards as `index/N.json`; the newest one if nothing changed."""
        digest, shards = self.plan["digest"], self.plan["num_shards"]
        return write_index(self.store, self._records, plan=digest, shards=shards)

    def indices(self) -> list[str]:
        """Names of the indices, oldest first."""
        return index_names(self.store)

    def verify(self, *, full: bool = False) -> list[Problem]:
        """All that is damaged, of all of it; see `data.verification`."""
        return [problem for problem in verification.verify(self, full=full) if problem.damage]

    def status(self) -> Record:
        """What `semix status` shows, as plain values."""
        return {"url": self.url, "plan": self.plan["digest"], **asdict(self.progress())}

    @cached_property
    def prototypes_sha256(self) -> str:
        """Of the prototypes that shards are labelled with; a commit record names it."""
        return sha256(self.store.get(PROTOTYPES)).hexdigest()


def _read_plan(store: Store) -> Record:
    place = f"{store.url}/{PLAN}"
    try:
        plan = read_plan(store.get(PLAN))
    except FileNotFoundError:
        remedy = "holds no plan.json; start it with `semix build`"
        raise InputError("url", store.url, remedy) from None
    except (IsADirectoryError, ValueError) as error:
        remedy = f"{error}; bring it back from a copy, nothing else says what this root holds"
        raise InputError(place, "damaged", remedy) from None
    if plan["schema"] != SCHEMA:
        raise InputError(
            f"{place} schema",
            plan["schema"],
            f"another version of semix wrote it, this one reads {SCHEMA}; use that version",
        )
    return plan
