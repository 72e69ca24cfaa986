"""Complete roots made in milliseconds: real tars, records and an index; the images are noise."""

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
    ExclusionFlags,
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
PLAN_DIGEST = "d" * 64  # of every plan that is made here
LABELS_DIGEST = "ab12" * 16  # of the label set that is made here
HASH = "ab" * 32
STEM = "shards/0012/0012345-abababab"


def record(group: int, count: int = 2, **changes: Any) -> dict[str, Any]:
    """The fields of a KEY.json: `count` images between two of three classes."""
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


# Valid contents of each kind of file in a root: records of shard 12345, labels, and others.
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
    ExclusionFlags: {"plan": PLAN_DIGEST, "excluded": [3], "restored": [5, 6], "time": 1.5},
    Lease: {"host": "machine-0123", "pid": 17},
}


def pixels(group: int, count: int, side: int) -> np.ndarray:
    """uint8 [count, side, side, 3]."""
    rng = np.random.default_rng(group)
    return rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def sample(
    group: int,
    count: int = 2,
    *,
    side: int = 8,
    extension: str = "webp",
    mark: bool = False,
    **changes: Any,
) -> GroupSample:
    images = [encode_image(image, extension, mark=mark) for image in pixels(group, count, side)]
    return GroupSample(series_of(record(group, count, **changes)), images, extension)


def series_of(values: dict[str, Any]) -> Any:
    """A SeriesRecord; an `Unsound` one where these values are invalid."""
    try:
        return SeriesRecord.read(json.dumps(values).encode())
    except ValueError:
        return Unsound(values)


@dataclass(frozen=True)
class Unsound:
    """An invalid KEY.json, which can be written and must be rejected when read."""

    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def written(self) -> bytes:
        return json.dumps(self.values).encode()


def tar_of(*samples: GroupSample) -> bytes:
    buffer = io.BytesIO()
    write_tar(buffer, samples)
    return buffer.getvalue()


ENCODER: dict[str, Any] = {"model": "tiny", "pretrained": None, "dtype": "float32", "files": {}}
MODELS = {"generator": {"model": "sd", "revision": None, "files": {}}, "annotation": ENCODER}


def make_plan(shards: int, groups: int, count: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "schema": Plan.SCHEMA,
        "digest": PLAN_DIGEST,
        "class_names": list(NAMES),
        "num_groups": groups,
        "num_shards": shards,
        "groups_per_pair": 1,
        "groups_per_shard": max(1, groups // max(1, shards)),
        "images_per_group": count,
        "classes_per_group": 2,
        "normalize": False,
        "config": {},
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
        groups: number of series in the tar.
        left_out: the shard's series that are not in it, with the reason.
        features: [groups, count, D]; zeros by default.
        changes: fields of the record that differ.
    """
    rows = np.zeros((groups, count, 4)) if features is None else features
    feature_file = save({"features": rows.astype(np.float16)})
    digests = [hashlib.sha256(content).hexdigest() for content in (tar, feature_file)]
    stem = shard_stem(shard)
    names = [f"{stem}-{digests[0][:8]}.tar", f"{stem}-{digests[1][:8]}.features.safetensors"]
    store.put(names[0], tar)
    store.put(names[1], feature_file)
    fields = {
        "spec": spec_digest(PLAN_DIGEST, shard),
        "shard": shard,
        "tar": names[0],
        "sha256": digests[0],
        "bytes": len(tar),
        "features": {"name": names[1], "sha256": digests[1], "bytes": len(feature_file)},
        "groups": groups,
        "first": first,
        "seconds": {"generate": 1.5},
        "wall_seconds": 2.0,
        "attempt": 1,
        "worker": "host:1",
        "versions": {"python": "3.11"},
    } | changes
    if left_out:
        fields["left_out"] = [{"group": g, "reason": why} for g, why in left_out.items()]
    store.put(f"{stem}.json", json.dumps(fields).encode())
    return fields


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
        tars: contents of the first shards' tars, in place of generated ones.
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


def committed(root: Root) -> dict[int, CommitRecord]:
    """The commit record of each intact shard, ascending."""
    return {record.shard: record for folder in root.folders() for record in folder.intact}


def label_set(root: Root, **changes: Any) -> LabelSet:
    """A label set that has no labels yet."""
    return create_set(root, LabelSetRecord.model_validate(LABEL_SET | changes))


def labels_of(group: int, count: int = 2, **changes: Any) -> SeriesLabels:
    """The labels of a series as its record has them, with `changes`."""
    fields = {key: record(group, count)[key] for key in ("group", "weights", "labels")}
    return SeriesLabels.read(json.dumps(fields | changes).encode())


def root_of(folder: Path | str, samples: Sequence[GroupSample], class_names: Sequence[str]) -> Root:
    """A root of one shard that holds these samples, indexed."""
    store, groups, count = Store(str(folder)), len(samples), len(samples[0].images)
    plan = make_plan(1, groups, count, class_names=list(class_names))
    store.put("plan.json", json.dumps(plan).encode())
    put_shard(store, 0, tar_of(*samples), first=0, groups=groups, count=count)
    root = Root(store.url)
    root.write_index()
    return root
