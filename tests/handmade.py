"""Whole roots made by hand in milliseconds: real tars, records and an index, noise for images."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from semix.data.formats import (
    FLAGS,
    CommitRecord,
    Extension,
    Failure,
    LabelSetRecord,
    Lease,
    Plan,
    SeriesFlags,
    SeriesLabels,
    SeriesRecord,
    ShardEntry,
    ShardLabels,
    StoredFile,
    Tombstone,
    shard_stem,
    spec_digest,
)
from semix.data.images import encode_image
from semix.data.label_sets import LabelSet, create_set
from semix.data.root import Root
from semix.data.store import Store
from semix.data.tar import GroupSample, write_tar

NAMES = ("cat", "dog", "fox")
PLAN_DIGEST = "d" * 64  # of all plans here
LABELS_DIGEST = "ab12" * 16  # of a label set
HASH = "ab" * 32
STEM = "shards/0012/0012345-abababab"


def record(group: int, count: int = 2, **changes: Any) -> dict[str, Any]:
    """A KEY.json of `count` images between two of three classes."""
    first, second = [(0, 1), (0, 2), (1, 2)][group % 3]
    alphas = [position / max(1, count - 1) for position in range(count)]
    return {
        "group": group,
        "classes": [first, second],
        "names": [NAMES[first], NAMES[second]],
        "seed": group + 1000,
        "alphas": alphas,
        "weights": [1.1 * alpha - 0.05 for alpha in alphas],
        "labels": [[[first, alpha], [second, 1 - alpha]] for alpha in alphas],
        "noise": {"strategy": "random", "stability": None},
    } | changes


# What each file may hold: shard 12345, its labels, and what else lies in a root.
FILE = {"sha256": HASH, "bytes": 7}
ENTRY = {
    "shard": 12345,
    "tar": f"{STEM}.tar",
    **FILE,
    "features": {"name": f"{STEM}.features.safetensors", **FILE},
    "groups": 64,
    "first": 790080,
}
LABEL_SET = {
    "digest": LABELS_DIGEST,
    "plan": PLAN_DIGEST,
    "annotation": {"rule": "projection"},
    "encoders": {"model": "a clip"},
    "features": "root",
    "batch": 64,
}
EXAMPLES: dict[type[StoredFile], dict[str, Any]] = {
    SeriesRecord: record(3),
    ShardEntry: ENTRY | {"left_out": [{"group": 790081, "reason": "flat"}]},
    CommitRecord: ENTRY
    | {"spec": HASH, "seconds": {"generate": 1.5}, "wall_seconds": 2.5, "attempt": 2},
    Failure: {"shard": 3, "attempt": 1, "error": "ValueError", "message": "m", "time": 1.5},
    Tombstone: {"shard": 3, "why": "cut", "record": "{"},
    Extension: {"plan": PLAN_DIGEST, "groups_per_pair": 2}
    | {"first_group": 6, "first_shard": 3, "groups": 6, "shards": 3},
    ShardLabels: {"spec": HASH, "shard": 3, "images": HASH}
    | {"groups": [{k: record(3)[k] for k in ("group", "weights", "labels")}]},
    LabelSetRecord: LABEL_SET,
    SeriesFlags: {"index": "index/0.json", "digest": HASH, "labels": None}
    | {"flags": {flag: [] for flag in FLAGS} | {"still": [3, 5]}},
    Lease: {"host": "machine-0123", "pid": 17},
}


def pixels(group: int, count: int, side: int) -> np.ndarray:
    """uint8 [count, side, side, 3]."""
    rng = np.random.default_rng(group)
    return rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def sample(
    group: int, count: int = 2, *, side: int = 8, extension: str = "webp", **changes: Any
) -> GroupSample:
    images = [encode_image(image, extension) for image in pixels(group, count, side)]
    return GroupSample(series_of(record(group, count, **changes)), images, extension)


def series_of(values: dict[str, Any]) -> Any:
    """A record; of what no record can say, something that is written like one."""
    try:
        return SeriesRecord.read(json.dumps(values).encode())
    except ValueError:
        return Unsound(values)


@dataclass(frozen=True)
class Unsound:
    """A KEY.json that nobody should read."""

    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def written(self) -> bytes:
        return json.dumps(self.values).encode()


def tar_of(*samples: GroupSample) -> bytes:
    buffer = io.BytesIO()
    write_tar(buffer, samples)
    return buffer.getvalue()


ENCODER = {"model": "tiny", "pretrained": None, "dtype": "float32", "files": {}}
MODELS = {"generator": {"model": "sd", "revision": None, "files": {}}, "annotation": ENCODER}


def make_plan(shards: int, groups: int, count: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "schema": Plan.SCHEMA,
        "digest": PLAN_DIGEST,
        "class_names": list(NAMES),
        "num_groups": groups,
        "num_shards": shards,
        "images_per_group": count,
        "config": {
            "shards": {"groups_per_shard": max(1, groups // max(1, shards))},
            "mixing": {"groups_per_pair": 1},
        },
        "models": MODELS,
        "versions": {},
    } | changes


def put_shard(
    store: Store,
    shard: int,
    tar: bytes,
    *,
    first: int,
    groups: int,
    count: int,
    features: np.ndarray | None = None,
    left_out: Mapping[int, str] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Write a tar, its features and its commit record, which is returned.

    Args:
        groups: that are in the tar; left_out: those that are not, and why.
        features: [groups, count, D]; zeros by default.
        changes: to the record.
    """
    rows = np.zeros((groups, count, 4)) if features is None else features
    stored = save({"features": rows.astype(np.float16)})
    digests = [hashlib.sha256(content).hexdigest() for content in (tar, stored)]
    stem = shard_stem(shard)
    names = [f"{stem}-{digests[0][:8]}.tar", f"{stem}-{digests[1][:8]}.features.safetensors"]
    store.put(names[0], tar)
    store.put(names[1], stored)
    found = {
        "spec": spec_digest(PLAN_DIGEST, shard),
        "shard": shard,
        "tar": names[0],
        "sha256": digests[0],
        "bytes": len(tar),
        "features": {"name": names[1], "sha256": digests[1], "bytes": len(stored)},
        "groups": groups,
        "first": first,
        "seconds": {"generate": 1.5},
        "wall_seconds": 2.0,
        "tflop": 0.25,
        "attempt": 1,
        "worker": "host:1",
        "versions": {"python": "3.11"},
    } | changes
    if left_out:
        found["left_out"] = [{"group": g, "reason": why} for g, why in left_out.items()]
    store.put(f"{stem}.json", json.dumps(found).encode())
    return found


def make_root(
    folder: Path | str,
    shards: int = 2,
    groups: int = 3,
    *,
    count: int = 2,
    side: int = 8,
    extension: str = "webp",
    tars: Sequence[bytes] = (),
) -> Root:
    """`shards` shards of `groups` series of `count` images, indexed.

    Args:
        tars: contents to commit in place of the first shards' own.
    """
    store = Store(str(folder))
    plan = make_plan(shards, shards * groups, count)
    store.put("plan.json", json.dumps(plan).encode())
    for shard in range(shards):
        first = shard * groups
        if shard < len(tars):
            tar = tars[shard]
        else:
            series = range(first, first + groups)
            tar = tar_of(*(sample(g, count, side=side, extension=extension) for g in series))
        put_shard(store, shard, tar, first=first, groups=groups, count=count)
    root = Root(store.url)
    root.write_index()
    return root


def label_set(root: Root, **changes: Any) -> LabelSet:
    """A set without labels yet."""
    return create_set(root, LabelSetRecord(**LABEL_SET | changes))


def labels_of(group: int, count: int = 2, **changes: Any) -> SeriesLabels:
    """As the series' own record has them, or others."""
    own = {key: record(group, count)[key] for key in ("group", "weights", "labels")}
    return SeriesLabels.read(json.dumps(own | changes).encode())


def root_of(folder: Path | str, samples: Sequence[GroupSample], class_names: Sequence[str]) -> Root:
    """One shard of these samples, indexed."""
    store, groups, count = Store(str(folder)), len(samples), len(samples[0].images)
    plan = make_plan(1, groups, count, class_names=list(class_names))
    store.put("plan.json", json.dumps(plan).encode())
    put_shard(store, 0, tar_of(*samples), first=0, groups=groups, count=count)
    root = Root(store.url)
    root.write_index()
    return root
