"""A store whose files are computed from shard numbers: a million shards, no disk."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import semix.data.store
from semix.data.formats import shard_stem, spec_digest
from semix.data.root import Root
from semix.data.store import FileInfo
from tests.handmade import PLAN_DIGEST, make_plan
from tests.tally import Tally

PAGE = 1000  # names per request of a listing, as in S3
RECORD_BYTES, GROUPS = 1200, 2
STAGES = ("noise", "generate", "encode", "annotate", "write")


class SimulatedShards:
    """The first `done` of `shards` shards, as an object store would list and give them.

    Attributes:
        requests: their number by kind; a listing takes one per thousand names.
        index: content of index/0.json; there is no such file by default.
        written: content by name of the files that were put.
    """

    url, local, shared, parallel = "memory://simulated", False, False, 16

    def __init__(self, shards: int, done: int, *, index: bytes | None = None) -> None:
        self.shards, self.done, self.index = shards, done, index
        self.requests = Tally()
        self.written: dict[str, bytes] = {}
        self._plan = json.dumps(make_plan(shards, shards * GROUPS)).encode()

    def get(self, name: str, max_bytes: int) -> bytes:
        self.requests.add("get")
        if name == "plan.json":
            return self._plan
        if name == "index/0.json" and self.index:
            return self.index
        if name.startswith("shards/") and name.endswith(".json"):
            return record_bytes(int(name[-12:-5]))
        try:
            return self.written[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    def exists(self, name: str) -> bool:
        self.requests.add("head")
        return name in self.written or (
            name.startswith("shards/") and int(name[-12:-5]) < self.done
        )

    def info(self, name: str) -> FileInfo:
        self.requests.add("head")
        return FileInfo(len(self.written[name]), 2.0)

    def scan(self, folder: str, suffix: str = "") -> tuple[dict[str, FileInfo], list[str]]:
        files: dict[str, FileInfo] = {}
        folders: list[str] = []
        if folder == "shards":
            folders = [f"shards/{number:04d}" for number in range(-(-self.done // PAGE))]
        elif folder.startswith("shards/"):
            files = self._files(int(folder[-4:]))
        elif folder == "index" and self.index:
            files = {"index/0.json": FileInfo(len(self.index), 1.0)}
        files |= {
            name: FileInfo(len(content), 2.0)
            for name, content in self.written.items()
            if name.rpartition("/")[0] == folder
        }
        self.requests.add("list", max(1, -(-(len(files) + len(folders)) // PAGE)))
        return {n: info for n, info in files.items() if n.endswith(suffix)}, folders

    def names(self, folder: str) -> tuple[dict[str, None], list[str]]:
        files, folders = self.scan(folder)
        return dict.fromkeys(files), folders

    def put(self, name: str, content: bytes) -> None:
        self.requests.add("put")
        self.written[name] = content

    def create(self, name: str, content: bytes) -> bool:
        self.requests.add("put")
        return self.written.setdefault(name, content) is content

    def _files(self, number: int) -> dict[str, FileInfo]:
        files = {}
        for shard in range(number * PAGE, min((number + 1) * PAGE, self.done)):
            stem, (tar, features) = shard_stem(shard), _digests(shard)
            files[f"{stem}-{tar[:8]}.tar"] = FileInfo(100_000 + shard, 1.0)
            files[f"{stem}-{features[:8]}.features.safetensors"] = FileInfo(4096, 1.0)
            files[f"{stem}.json"] = FileInfo(RECORD_BYTES, 1.0)
        return files


@contextmanager
def simulated(shards: SimulatedShards) -> Iterator[Root]:
    """The root over such a store; within the block every store of this process is that one."""
    before = semix.data.store._backend
    semix.data.store._backend = lambda location, *, persistent: shards  # type: ignore[assignment,return-value]
    try:
        yield Root(shards.url)
    finally:
        semix.data.store._backend = before


def record_of(shard: int) -> dict[str, Any]:
    tar, features = _digests(shard)
    stem = shard_stem(shard)
    return {
        "spec": spec_digest(PLAN_DIGEST, shard),
        "shard": shard,
        "tar": f"{stem}-{tar[:8]}.tar",
        "sha256": tar,
        "bytes": 100_000 + shard,
        "features": {
            "name": f"{stem}-{features[:8]}.features.safetensors",
            "sha256": features,
            "bytes": 4096,
        },
        "groups": GROUPS,
        "first": shard * GROUPS,
        "seconds": dict.fromkeys(STAGES, 1.25),
        "wall_seconds": 6.25,
        "attempt": 1,
        "prototypes": "ab" * 32,
        "worker": "host:1",
    }


def record_bytes(shard: int) -> bytes:
    """A commit record padded with blanks, so that a listing knows its size unwritten."""
    return json.dumps(record_of(shard)).encode().ljust(RECORD_BYTES)


def index_of(shards: int) -> bytes:
    """The index of the first `shards` shards, as `Root.write_index` writes it."""
    lines = ",\n".join(_line(shard) for shard in range(shards))
    header = f'{{"plan":"{PLAN_DIGEST}","prototypes":"{"ab" * 32}","shards":[\n'
    return f"{header}{lines}\n]}}\n".encode()


def _line(shard: int) -> str:
    entry = record_of(shard)
    for name in ("spec", "worker", "attempt", "prototypes", "seconds", "wall_seconds"):
        del entry[name]
    return json.dumps(entry, sort_keys=True, separators=(",", ":"))


@lru_cache(PAGE)
def _digests(shard: int) -> tuple[str, str]:
    """Made-up SHA-256 of a shard's tar and features."""
    digits = hashlib.sha512(b"%d" % shard).hexdigest()
    return digits[:64], digits[64:]
