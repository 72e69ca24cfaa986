"""Whole roots made by hand in milliseconds: real tars, records and an index, noise for images."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from data.images import encode_image
from data.root import Root, spec_digest
from data.shards import GroupSample, shard_name, write_tar
from data.store import Store

NAMES = ("cat", "dog", "fox")
PLAN_DIGEST = "d" * 64  # of all plans here


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


def pixels(group: int, count: int, side: int) -> np.ndarray:
    """uint8 [count, side, side, 3]."""
    rng = np.random.default_rng(group)
    return rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def sample(
    group: int, count: int = 2, *, side: int = 8, extension: str = "webp", **changes: Any
) -> GroupSample:
    images = [encode_image(image, extension) for image in pixels(group, count, side)]
    return GroupSample(record(group, count, **changes), images, extension)


def tar_of(*samples: GroupSample) -> bytes:
    buffer = io.BytesIO()
    write_tar(buffer, samples)
    return buffer.getvalue()


def make_plan(shards: int, groups: int, count: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "schema": 2,
        "digest": PLAN_DIGEST,
        "class_names": list(NAMES),
        "num_groups": groups,
        "num_shards": shards,
        "images_per_group": count,
        "config": {
            "shards": {"groups_per_shard": groups // max(1, shards)},
            "mixing": {"groups_per_pair": 1},
        },
        "models": {},
        "versions": {},
    } | changes


def put_shard(store: Store, shard: int, tar: bytes, *, first: int, groups: int, count: int) -> dict:
    """Write a tar, its features and its commit record, which is returned."""
    features = save({"features": np.zeros((groups, count, 4), dtype=np.float16)})
    digests = [hashlib.sha256(content).hexdigest() for content in (tar, features)]
    stem = shard_name(shard)
    names = [f"{stem}-{digests[0][:8]}.tar", f"{stem}-{digests[1][:8]}.features.safetensors"]
    store.put(names[0], tar)
    store.put(names[1], features)
    found = {
        "spec": spec_digest(PLAN_DIGEST, shard),
        "shard": shard,
        "tar": names[0],
        "sha256": digests[0],
        "bytes": len(tar),
        "features": {"name": names[1], "sha256": digests[1], "bytes": len(features)},
        "groups": groups,
        "first": first,
        "seconds": {"generate": 1.5},
        "wall_seconds": 2.0,
        "tflop": 0.25,
        "attempt": 1,
        "worker": "host:1",
        "versions": {"python": "3.11"},
    }
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


def root_of(folder: Path | str, samples: Sequence[GroupSample], class_names: Sequence[str]) -> Root:
    """One shard of these samples, indexed."""
    store, groups, count = Store(str(folder)), len(samples), len(samples[0].images)
    plan = make_plan(1, groups, count, class_names=list(class_names))
    store.put("plan.json", json.dumps(plan).encode())
    put_shard(store, 0, tar_of(*samples), first=0, groups=groups, count=count)
    root = Root(store.url)
    root.write_index()
    return root
