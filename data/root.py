"""A mixed dataset's root: its plan, commit records, failures and index; what is done."""

import hashlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from data.errors import InputError
from data.fingerprint import canonical_json, fingerprint
from data.images import decode_image
from data.progress import Progress, summed
from data.shards import read_tar, shard_name
from data.store import Store

PLAN = "plan.json"
FIDELITY = "fidelity.json"  # only where the images are approximate
SCHEMA = 2
Record = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    shard: int
    text: str

    def __str__(self) -> str:
        return f"shard {self.shard}: {self.text}"


def spec_digest(plan_digest: str, shard: int) -> str:
    """What a commit record must carry to count: this plan and this shard."""
    return fingerprint([plan_digest, shard])


class Root:
    """An existing root, read from the store alone.

    Raises:
        InputError: there is no plan.json, or another version of semix wrote it.
    """

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self.url = self.store.url
        if not self.store.exists(PLAN):
            raise InputError("url", self.url, "holds no plan.json; start it with `semix build`")
        self.plan: Record = json.loads(self.store.get(PLAN))
        if self.plan.get("schema") != SCHEMA:
            found = self.plan.get("schema")
            raise InputError(f"{self.url}/{PLAN} schema", found, f"this semix reads {SCHEMA}")
        self._records: dict[str, Record | None] = {}  # records never change once written

    def committed(self) -> dict[int, Record]:
        """Commit records of this plan by shard; everything else counts as missing."""
        found = {}
        for name in self.store.list("shards"):
            record = self._record(name) if name.endswith(".json") else None
            if record is not None:
                found[record["shard"]] = record
        return dict(sorted(found.items()))

    def is_committed(self, shard: int) -> bool:
        name = f"{shard_name(shard)}.json"
        return self.store.exists(name) and self._record(name) is not None

    def missing(self) -> list[int]:
        done = self.committed()
        return [shard for shard in range(self.plan["num_shards"]) if shard not in done]

    def failures(self) -> dict[int, list[Record]]:
        """Attempt records of shards that are still missing."""
        done, found = self.committed(), defaultdict(list)
        for name in self.store.list("failed"):
            record = json.loads(self.store.get(name))
            if record["shard"] not in done:
                found[record["shard"]].append(record)
        return dict(sorted(found.items()))

    def progress(self) -> Progress:
        return summed(self.plan, self.committed().values(), failed=len(self.failures()))

    def commit(self, record: Record) -> bool:
        """Publish a commit record, last; False if the shard is committed already."""
        name = f"{shard_name(record['shard'])}.json"
        content = json.dumps(record, indent=1, sort_keys=True).encode()
        if self.store.create(name, content):
            return True
        self._records.pop(name, None)
        if self._record(name) is not None:
            return False
        self.store.put(name, content)  # what stood there was damaged or of another plan
        self._records.pop(name, None)
        return True

    def record_failure(self, shard: int, error: Record) -> None:
        """Write `failed/...N.json` for the next free attempt number N."""
        stem, attempt = shard_name(shard).replace("shards/", "failed/", 1), 1
        while not self.store.create(
            f"{stem}.{attempt}.json",
            json.dumps({"shard": shard, "attempt": attempt, **error}, indent=1).encode(),
        ):
            attempt += 1

    def discard(self, shard: int) -> None:
        """Remove a commit record, so that the shard counts as missing and is made again."""
        name = f"{shard_name(shard)}.json"
        self.store.delete(name)
        self._records.pop(name, None)

    def write_index(self) -> str:
        """Pin the committed shards as `index/N.json`; the newest one if nothing changed."""
        keep = ("shard", "tar", "sha256", "bytes", "groups", "features")
        shards = [{key: record[key] for key in keep} for record in self.committed().values()]
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
        names = self.store.list("index")
        return sorted(names, key=lambda name: int(name.split("/")[-1].removesuffix(".json")))

    def verify(self, *, full: bool = False) -> list[Problem]:
        """Compare tars with their commit records: sizes; with `full` every hash and image."""
        return [
            Problem(shard, text)
            for shard, record in self.committed().items()
            if (text := self._problem(record, full=full))
        ]

    def status(self) -> Record:
        """What `semix status` shows, as plain values."""
        return {"url": self.url, "plan": self.plan["digest"], **asdict(self.progress())}

    def _record(self, name: str) -> Record | None:
        if name not in self._records:
            self._records[name] = self._read_record(name)
        return self._records[name]

    def _read_record(self, name: str) -> Record | None:
        try:
            record = json.loads(self.store.get(name))
            expected = spec_digest(self.plan["digest"], record["shard"])
        except (ValueError, TypeError, KeyError):
            return None
        in_place = f"{shard_name(record['shard'])}.json" == name
        return record if in_place and record.get("spec") == expected else None

    def _problem(self, record: Record, *, full: bool) -> str | None:
        for part in (record, record["features"]):
            name = part.get("tar") or part["name"]
            if not self.store.exists(name):
                return f"{name} is missing"
            if self.store.size(name) != part["bytes"]:
                return f"{name} has {self.store.size(name)} bytes, not {part['bytes']}"
            if full and hashlib.sha256(self.store.get(name)).hexdigest() != part["sha256"]:
                return f"{name} does not have the recorded SHA-256"
        return self._image_problem(record) if full else None

    def _image_problem(self, record: Record) -> str | None:
        groups = 0
        try:
            with self.store.open(record["tar"]) as file:
                for sample in read_tar(file):
                    groups += 1
                    for image in sample.images:
                        decode_image(image)
        except ValueError as error:
            return f"{record['tar']}: {error}"
        return None if groups == record["groups"] else f"{groups} groups, not {record['groups']}"
