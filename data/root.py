"""The root of a mixed dataset: its plan, its extensions, the state of its shards, its progress."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import numpy as np

from semix.data.errors import InputError, TooLarge
from semix.data.files import NoRegularFile
from semix.data.formats import (
    PAIRS,
    PER_FOLDER,
    PLAN,
    PROTOTYPES,
    STAGES,
    CommitRecord,
    Extension,
    Failure,
    Plan,
    ShardEntry,
    record_name,
)
from semix.data.index import index_names, write_index
from semix.data.layout import Layout, layout_of, read_extensions
from semix.data.records import Attempts, Records, discard_record, discards_of
from semix.data.store import Store

ShardInput = Literal["prototypes", "pairs"]  # files on which the content of shards depends


@dataclass(frozen=True)
class RootProgress:
    """Counts of shards, groups and images in a root.

    Attributes:
        left_out: series of committed shards that came out flat or not finite.
        seconds: worker time, summed over the committed shards.
        stages: the seconds of each stage; stages overlap, so they may add up to more.
        tflop: computed for the committed shards; None if a record of them lacks it.
    """

    shards: int
    done: int
    failed: int
    groups: int
    groups_done: int
    images: int
    images_done: int
    left_out: int
    seconds: float
    stages: dict[str, float]
    tflop: float | None


class Root:
    """An existing root, read from the store alone.

    Attributes:
        plan: `stored_plan`, the content of plan.json, plus groups and shards of `extensions`.
        layout: which groups are in which shard.
        overrides: settings that differ here from plan.json and change no byte of a shard, such as
            where models are stored on this machine.
        heartbeat: called after each listed folder, so that a supervisor sees progress.
    Raises:
        InputError: plan.json is missing, damaged, or written by another version of semix.
    """

    def __init__(self, url: str, *, heartbeat: Callable[[], None] = lambda: None) -> None:
        self.heartbeat = heartbeat
        self.overrides: Sequence[str] = ()
        self.store = Store(url)
        self.url = self.store.url
        self.stored_plan = _read_plan(self.store)
        self.extensions: list[Extension] = read_extensions(self.store, self.stored_plan)
        self._records = Records(
            self.store, self.plan.digest, shards=self.plan.num_shards, heartbeat=heartbeat
        )
        self._attempts = Attempts(self.store)
        self._hashes: dict[str, str] = {}

    @cached_property
    def plan(self) -> Plan:
        if not self.extensions:
            return self.stored_plan
        sizes = {"num_groups": self.layout.num_groups, "num_shards": self.layout.num_shards}
        return self.stored_plan.model_copy(update=sizes)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.stored_plan, self.extensions)

    @property
    def num_classes(self) -> int:
        return len(self.plan.class_names)

    def committed(self) -> dict[int, ShardEntry]:
        """The entry of each committed shard, ascending; other shards count as missing."""
        return {entry.shard: entry for entry in self.entries()}

    def entries(self) -> Iterator[ShardEntry]:
        """The entries of `committed` one by one, which takes less memory."""
        self._records.refresh()
        return iter(self._records.rows())

    def images(self) -> dict[int, str]:
        """SHA-256 of the tar of each committed shard, ascending."""
        self._records.refresh()
        return self._records.rows().images()

    def folder(self, number: int) -> dict[int, ShardEntry]:
        """The entry of each committed shard among the thousand from 1000 x `number` on."""
        start = number * PER_FOLDER
        self._records.refresh(start, start + PER_FOLDER)
        rows = self._records.rows().between(start, start + PER_FOLDER)
        return {entry.shard: entry for entry in rows}

    def record(self, shard: int) -> CommitRecord | None:
        """The full commit record of a shard, read from the store; None if it is missing."""
        return self._records.find(shard)

    def is_committed(self, shard: int) -> bool:
        return self.record(shard) is not None

    def done(self) -> list[int]:
        """Shards that are committed, ascending."""
        self._records.refresh()
        numbers: list[int] = self._records.rows().numbers.tolist()
        return numbers

    def missing(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Shards that are not committed, ascending; from `start` up to, not including, `stop`.

        Only the folders of these shards are listed.
        """
        self._records.refresh(start, stop)
        return self._records.missing(start, stop)

    def failed_attempts(self, missing: Sequence[int] | None = None) -> dict[int, int]:
        """The number of failed attempts at each of these shards, by default of all missing ones.

        The records of attempts are not read.
        """
        missing = self.missing() if missing is None else missing
        return {s: len(numbers) for s, numbers in self._attempts.numbers(missing).items()}

    def failures(self) -> dict[int, list[Failure]]:
        """The failed attempts at shards that are still missing."""
        return self._attempts.read(self._attempts.numbers(self.missing()))

    def attempts(self, shard: int) -> int:
        """How many attempts at a shard failed."""
        return self._attempts.last(shard)

    def record_failure(self, failure: Failure) -> None:
        """Write `failed/...N.json` for the next free attempt number N."""
        self._attempts.add(failure)

    def commit(self, record: CommitRecord) -> bool:
        """Publish a commit record, after the files it names; False if one is there already.

        Raises:
            InputError: a newer version of semix wrote the existing record.
        """
        name, count = record_name(record.shard), discards_of(self.store, record.shard)
        content = record.model_copy(update={"discards": count}).written(indent=1)
        if self.store.create(name, content):
            return True
        if self.is_committed(record.shard):
            return False
        self.store.put(name, content)  # the record there was damaged or of another plan
        return True

    def discard(self, shard: int, *, why: str = "") -> None:
        """Discard a commit record, so that the shard counts as missing and is made again."""
        discard_record(self.store, shard, why=why)

    def progress(self) -> RootProgress:
        failed = len(self.failed_attempts())
        rows, plan = self._records.rows().array, self.plan
        groups, images = int(rows["groups"].sum()), plan.images_per_group
        tflop = float(rows["tflop"].sum())
        return RootProgress(
            shards=plan.num_shards,
            done=len(rows),
            failed=failed,
            groups=plan.num_groups,
            groups_done=groups,
            images=plan.num_groups * images,
            images_done=groups * images,
            left_out=sum(map(len, rows["left_out"])),
            seconds=float(rows["wall_seconds"].sum()),
            stages=_seconds_by_stage(rows["seconds"].sum(0)),
            tflop=None if np.isnan(tflop) else tflop,
        )

    def status(self) -> dict[str, Any]:
        """The values that `semix status` shows."""
        return {"url": self.url, "plan": self.plan.digest, **asdict(self.progress())}

    def shards_by_input(self, file: ShardInput) -> Counter[str]:
        """Number of shards by the SHA-256 of the file they were made with; "" if not recorded."""
        self._records.refresh()
        names = self._records.rows().array[file].tolist()
        return Counter(name.decode() for name in names)

    def write_index(self) -> str:
        """Pin the committed shards as `index/N.json`; returns the newest index if it is equal."""
        self._records.refresh()
        return write_index(self.store, self._records.rows(), plan=self.plan.digest)

    def indices(self) -> list[str]:
        """Names of the indices, oldest first."""
        return index_names(self.store)

    def input_digests(self) -> dict[ShardInput, str]:
        """SHA-256 of the existing prototypes and pairs files, for the records of new shards."""
        files: dict[ShardInput, str] = {"prototypes": PROTOTYPES, "pairs": PAIRS}
        return {kind: digest for kind, name in files.items() if (digest := self._hash(name))}

    def _hash(self, name: str) -> str | None:
        """SHA-256 of a file that never changes once it exists; None if it is missing."""
        if name not in self._hashes:
            try:
                self._hashes[name] = sha256(self.store.get(name)).hexdigest()
            except FileNotFoundError:
                return None
        return self._hashes[name]


def _seconds_by_stage(seconds: Sequence[float]) -> dict[str, float]:
    pairs = zip(STAGES, map(float, seconds), strict=True)
    return {stage: value for stage, value in pairs if value}


def _read_plan(store: Store) -> Plan:
    location = f"{store.url}/{PLAN}"
    try:
        return Plan.read(store.get(PLAN, max_bytes=Plan.MAX_BYTES), where=location)
    except TooLarge:
        raise
    except (IsADirectoryError, NoRegularFile, ValueError) as error:
        remedy = f"{error}; restore it from a copy: nothing else describes this root"
        raise InputError(location, "damaged", remedy) from None
    except FileNotFoundError:
        remedy = "holds no plan.json"
        if store.local and not os.path.lexists(store.url):
            remedy = "there is no such folder"
        raise InputError("url", store.url, f"{remedy}; start it with `semix build`") from None
