"""A mixed dataset's root: its plan, commit records, failures and index; what is done."""

import json
from dataclasses import asdict
from functools import cached_property
from hashlib import sha256

from data import verification
from data.errors import InputError
from data.extension import Extension, Layout, layout_of, read_extensions
from data.failures import Failures
from data.fingerprint import canonical_json
from data.progress import Progress, summed
from data.records import (
    Record,
    Records,
    discards,
    index_names,
    record_name,
    spec_digest,
)
from data.schemas import SCHEMA, read_plan
from data.shards import shard_name
from data.store import Store
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
    Raises:
        InputError: there is no plan.json, it is damaged, or another version of semix wrote it.
    """

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self.url = self.store.url
        self.plan: Record = _read_plan(self.store)
        self.extensions: list[Extension] = read_extensions(self.store, self.plan)
        self._written = dict(self.plan)
        if self.extensions:
            self.plan["num_groups"] = self.layout.num_groups
            self.plan["num_shards"] = self.layout.num_shards
        self._records = Records(self.store, self.plan["digest"])
        self._failures = Failures(self.store)

    @cached_property
    def layout(self) -> Layout:
        """Which groups are in which shard."""
        return layout_of(self._written, self.extensions)

    def committed(self) -> dict[int, Record]:
        """What is kept of this plan's commit records, by shard; all else counts as missing."""
        last = self.plan["num_shards"]
        return {s: record for s, record in self._records.committed().items() if s < last}

    def is_committed(self, shard: int) -> bool:
        return self._records.find(shard) is not None

    def record(self, shard: int) -> Record | None:
        """The whole commit record of a shard; None if it is missing."""
        return self._records.find(shard)

    def missing(self) -> list[int]:
        done = self.committed()
        return [shard for shard in range(self.plan["num_shards"]) if shard not in done]

    def failures(self) -> dict[int, list[Record]]:
        """Attempt records of shards that are still missing."""
        return self._failures.of_missing(self.committed())

    def attempts(self, shard: int) -> int:
        """How many attempts at a shard failed."""
        return self._failures.attempts(shard)

    def progress(self) -> Progress:
        done = self.committed()
        return summed(self.plan, done.values(), failed=len(self._failures.of_missing(done)))

    def commit(self, record: Record) -> bool:
        """Publish a commit record, last; False if the shard is committed already."""
        shard = record["shard"]
        name, count = record_name(shard), discards(self.store, shard).get(shard, 0)
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
        number += discards(self.store, shard).get(shard, 0)
        while not self.store.create(f"{stem}.{number}.json", json.dumps(note, indent=1).encode()):
            number += 1
        self.store.delete(name)
        self._records.forget(shard)

    def write_index(self) -> str:
        """Pin the committed shards as `index/N.json`; the newest one if nothing changed."""
        shards = list(self.committed().values())
        content = canonical_json({"plan": self.plan["digest"], "shards": shards}).encode()
        indices = self.indices()
        if indices and self.store.get(indices[-1]) == content:
            return indices[-1]
        number = len(indices)
        while not self.store.create(f"index/{number}.json", content):
            number += 1
        return f"index/{number}.json"

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
        raise InputError(f"{place} schema", plan["schema"], f"this semix reads {SCHEMA}")
    return plan
