"""The root of a mixed dataset: its plan, its extensions, the state of its shards, its progress."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np

from semix.data.errors import InputError, TooLarge
from semix.data.files import NoRegularFile
from semix.data.formats import (
    PER_FOLDER,
    PLAN,
    PROTOTYPES,
    SHARDS,
    STAGES,
    CommitRecord,
    Extension,
    Failure,
    Plan,
    record_name,
)
from semix.data.index import index_names, index_text, write_index
from semix.data.layout import Layout, layout_of, read_extensions
from semix.data.records import (
    Attempts,
    Folder,
    Problem,
    discard_record,
    listed_shards,
    numbered_folders,
    parse_record,
    read_folder,
)
from semix.data.store import Store
from semix.data.threads import mapped

REMEDY = "restore the earlier file, or build into a new folder"


@dataclass(frozen=True)
class RootProgress:
    """Counts of shards, groups and images in a root, from listings alone.

    Attributes:
        groups_done, images_done: what the plan has for the committed shards, series that were left
            out of them included.
    """

    shards: int
    done: int
    failed: int
    groups: int
    groups_done: int
    images: int
    images_done: int


@dataclass(frozen=True)
class RecordTotals:
    """Sums over the commit records of a root.

    Attributes:
        left_out: series that came out flat or not finite.
        seconds: worker time.
        stages: the seconds of each stage; stages overlap, so they may add up to more.
    """

    left_out: int
    seconds: float
    stages: dict[str, float]


class Round(TypedDict):
    """Series that were planned together.

    Attributes:
        shards: their range, as `0-11`.
        by: how they are distributed over pairs: even, or the measure and the run.
        digest: of the run's settings and data; empty if even.
    """

    series: int
    shards: str
    by: str
    digest: str


class DamagedShards(InputError):
    """Committed shards whose record or files are damaged, so that no index can pin them."""

    def __init__(self, url: str, problems: Sequence[Problem]) -> None:
        self.problems = problems
        remedy = f"{len(problems)} damaged shards; `semix resume {url}` makes them again"
        super().__init__(f"{url}/{SHARDS}", str(problems[0]), remedy)


class Root:
    """An existing root, read from the store alone.

    Attributes:
        plan: `stored_plan`, the content of plan.json, plus groups and shards of `extensions`.
        layout: which groups are in which shard.
        heartbeat: called after each listed folder, so that a supervisor sees progress.
    Raises:
        InputError: plan.json is missing, damaged, or written by another version of semix.
    """

    def __init__(self, url: str, *, heartbeat: Callable[[], None] = lambda: None) -> None:
        self.heartbeat = heartbeat
        self.store = Store(url)
        self.url = self.store.url
        self.stored_plan = _read_plan(self.store)
        self.extensions: list[Extension] = read_extensions(self.store, self.stored_plan)
        self._attempts = Attempts(self.store)

    @cached_property
    def plan(self) -> Plan:
        if not self.extensions:
            return self.stored_plan
        sizes = {
            "num_groups": self.layout.num_groups,
            "num_shards": self.layout.num_shards,
            "groups_per_pair": self.extensions[-1].groups_per_pair,
        }
        return self.stored_plan.model_copy(update=sizes)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.stored_plan, self.extensions)

    @property
    def num_classes(self) -> int:
        return len(self.plan.class_names)

    def done(self) -> list[int]:
        """Shards that are committed, ascending."""
        shards: list[int] = np.flatnonzero(self._is_done(0, self.plan.num_shards)).tolist()
        return shards

    def missing(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Shards that are not committed, ascending; from `start` up to, not including, `stop`.

        Only the folders of these shards are listed.
        """
        stop = self.plan.num_shards if stop is None else min(stop, self.plan.num_shards)
        shards: list[int] = (start + np.flatnonzero(~self._is_done(start, stop))).tolist()
        return shards

    def is_committed(self, shard: int) -> bool:
        return self.store.exists(record_name(shard))

    def record(self, shard: int) -> CommitRecord | None:
        """The commit record of a shard; None if there is none.

        Raises:
            ValueError: it is damaged, or of another plan.
            InputError: a newer version of semix wrote it.
        """
        name = record_name(shard)
        where = f"{self.url}/{name}"
        try:
            content = self.store.get(name, max_bytes=CommitRecord.MAX_BYTES)
            return parse_record(content, shard, plan=self.plan.digest, where=where)
        except (FileNotFoundError, IsADirectoryError):
            return None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def folders(self) -> Iterator[Folder]:
        """Every folder of shards with its commit records, which are read; ascending."""
        for number in sorted(numbered_folders(self.store, SHARDS)):
            yield read_folder(self.store, number, plan=self.plan.digest, layout=self.layout)
            self.heartbeat()

    def records(self) -> Iterator[CommitRecord]:
        """The commit record of each shard, ascending; a thousand are in memory.

        Raises:
            DamagedShards: after the last one, if any is damaged, or its files are missing or cut.
        """
        problems: list[Problem] = []
        for folder in self.folders():
            # A shard beyond the plan belongs to an extension that is missing, and is no damage.
            problems += [p for p in folder.problems if p.shard in range(self.plan.num_shards)]
            yield from folder.intact
        if problems:
            raise DamagedShards(self.url, problems)

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
            OSError: the store fails, or a folder has the name of the record.
        """
        name = record_name(record.shard)
        if self.store.create(name, record.written(indent=1)):
            return True
        if not self.is_committed(record.shard):
            raise FileExistsError(f"{self.url}/{name} is no file; move it away")
        return False

    def discard(self, shard: int, *, why: str = "") -> None:
        """Discard a commit record, so that the shard counts as missing and is made again."""
        discard_record(self.store, shard, why=why)

    def progress(self) -> RootProgress:
        """How much is done, from listings."""
        is_done, plan = self._is_done(0, self.plan.num_shards), self.plan
        missing: list[int] = np.flatnonzero(~is_done).tolist()
        groups = plan.num_groups - sum(len(self.layout.groups_of(shard)) for shard in missing)
        return RootProgress(
            shards=plan.num_shards,
            done=plan.num_shards - len(missing),
            failed=len(self.failed_attempts(missing)),
            groups=plan.num_groups,
            groups_done=groups,
            images=plan.num_groups * plan.images_per_group,
            images_done=groups * plan.images_per_group,
        )

    def totals(self) -> RecordTotals:
        """What the intact commit records say, all of which are read."""
        left_out, wall_seconds, stages = 0, 0.0, dict.fromkeys(STAGES, 0.0)
        for folder in self.folders():
            for record in folder.intact:
                left_out += len(record.left_out)
                wall_seconds += record.wall_seconds
                for stage, seconds in record.seconds.items():
                    stages[stage] += seconds
        used_stages = {str(name): seconds for name, seconds in stages.items() if seconds}
        return RecordTotals(left_out, wall_seconds, used_stages)

    def status(self) -> dict[str, Any]:
        """The counts that `semix status` shows."""
        state = {"url": self.url, "plan": self.plan.digest, **asdict(self.progress())}
        return state | ({"rounds": rounds} if (rounds := self.rounds()) else {})

    def rounds(self) -> list[Round]:
        """The series that were planned at first, then those of each extension; [] without any."""
        by_runs = [self.stored_plan.by_run, *(extension.by_run for extension in self.extensions)]
        if not any(by_runs) and not self.extensions:
            return []
        return [
            Round(
                series=segment.groups,
                shards=f"{segment.first_shard}-{segment.last_shard}",
                by=f"{by_run.by}, {by_run.run}" if by_run else "even",
                digest=by_run.digest if by_run else "",
            )
            for segment, by_run in zip(self.layout.segments, by_runs, strict=True)
        ]

    def write_index(self) -> str:
        """Pin the committed shards as `index/N.json`; returns the newest index if it is equal.

        Raises:
            DamagedShards: a record is damaged, or files are missing or cut; nothing is written.
            InputError: shards were made with different prototypes.
        """
        lines, prototypes = [], ""
        for record in self.records():
            prototypes = prototypes or record.prototypes
            self._check_prototypes(record, prototypes)
            lines.append(record.entry.written())
        return write_index(self.store, index_text(self.plan.digest, lines, prototypes=prototypes))

    def indices(self) -> list[str]:
        """Names of the indices, oldest first."""
        return index_names(self.store)

    def made_with(self) -> CommitRecord | None:
        """The first readable commit record, if it names the prototypes of its shard.

        Every worker compares them before it makes a shard, so one record stands for all.
        """
        for number in sorted(numbered_folders(self.store, SHARDS)):
            for shard in listed_shards(self.store, number):
                try:
                    record = self.record(shard)
                except ValueError:  # damaged: the next index names it
                    continue
                if record is not None:
                    return record if record.prototypes else None
        return None

    def check_prototypes(self, content: bytes) -> None:
        """Raises InputError if committed shards were made with other prototypes.

        Args:
            content: of the prototypes file that exists, or is about to be written.
        """
        if record := self.made_with():
            self._check_prototypes(record, hashlib.sha256(content).hexdigest())

    def _check_prototypes(self, record: CommitRecord, digest: str) -> None:
        if record.prototypes not in ("", digest):
            remedy = f"are not those that shard {record.shard} was made with; {REMEDY}"
            raise InputError(f"{self.url}/{PROTOTYPES}", digest[:12], remedy)

    def _is_done(self, start: int, stop: int) -> np.ndarray:
        """Whether each shard from `start` up to, not including, `stop` has a record, bool."""
        wanted = set(range(start // PER_FOLDER, -(-stop // PER_FOLDER)))
        numbers = sorted(numbered_folders(self.store, SHARDS) & wanted)
        is_done = np.zeros(max(0, stop - start), bool)

        def listed(number: int) -> np.ndarray:
            return np.array(listed_shards(self.store, number), int)

        for shards in mapped(listed, numbers, threads=self.store.parallel):
            is_done[shards[(shards >= start) & (shards < stop)] - start] = True
            self.heartbeat()
        return is_done


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
