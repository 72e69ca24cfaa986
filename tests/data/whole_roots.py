"""Hand-made roots with every file that a built one has, prototypes among them."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from semix.data.fingerprint import canonical_json
from semix.data.formats import CommitRecord, Failure, File, shard_stem, spec_digest
from semix.data.root import Root
from semix.data.store import Store
from tests.handmade import ENCODER, PLAN_DIGEST, make_plan, make_root
from tests.tally import Tally

FACTS = {"encoder": json.dumps(ENCODER), "scale": "10.0"}


def prototypes(vectors: np.ndarray | None = None, facts: dict[str, str] = FACTS) -> bytes:
    """The bytes of prototypes.safetensors, sealed as a build seals them."""
    vectors = np.eye(3, 4, dtype=np.float32) if vectors is None else vectors
    digest = hashlib.sha256(canonical_json(facts).encode())
    digest.update(f"prototypes torch.{vectors.dtype} {list(vectors.shape)}".encode())
    digest.update(vectors.tobytes())
    note = canonical_json({"facts": facts, "sha256": digest.hexdigest()})
    return save({"prototypes": vectors}, {"semix": note})


def whole_root(folder: Path | str, shards: int = 3, groups: int = 2) -> Root:
    """A complete root: every shard committed, prototypes measured, an index written."""
    root = make_root(folder, shards, groups)
    root.store.create("prototypes.safetensors", prototypes())
    return root


def commit_record(
    shard: int, *, plan: str = PLAN_DIGEST, groups: int = 2, **changes: Any
) -> CommitRecord:
    """The record of a shard whose tar and features hold `abc`."""
    digest = hashlib.sha256(b"abc").hexdigest()
    stem = f"{shard_stem(shard)}-{digest[:8]}"
    values: dict[str, Any] = {
        "spec": spec_digest(plan, shard),
        "shard": shard,
        "tar": f"{stem}.tar",
        "sha256": digest,
        "bytes": 3,
        "features": File(name=f"{stem}.features.safetensors", sha256=digest, bytes=3),
        "groups": groups,
        "first": shard * groups,
        "seconds": {"generate": 1.5, "write": 0.5},
        "wall_seconds": 2.0,
        "attempt": 1,
    }
    return CommitRecord(**values | changes)


def failure(shard: int, time: float = 1.0, **changes: Any) -> Failure:
    """A failed attempt; its number is set when it is stored."""
    values = {"shard": shard, "attempt": 1, "error": "ValueError", "message": "group 3: flat"}
    return Failure(**values | {"time": time} | changes)


def empty_root(folder: Path, shards: int = 3, groups: int = 2) -> Root:
    """A root with a plan and nothing committed."""
    plan = make_plan(shards, shards * groups)
    Store(str(folder)).create("plan.json", json.dumps(plan).encode())
    return Root(str(folder))


class Counting:
    """A store that counts its calls; `get_many` counts as one `get` per name."""

    def __init__(self, store: Store) -> None:
        self.store, self.calls = store, Tally()
        self.url, self.parallel = store.url, store.parallel

    def get_many(self, names: Iterable[str], **options: int) -> dict[str, bytes]:
        names = list(names)
        if names:
            self.calls.add("get", len(names))
        return self.store.get_many(names, **options)

    def get(self, name: str, **options: int) -> bytes:
        self.calls.add("get")
        return self.store.get(name, **options)

    def __getattr__(self, name: str) -> Any:
        self.calls.add(name)
        return getattr(self.store, name)
