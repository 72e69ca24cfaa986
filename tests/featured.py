"""Handmade roots whose stored features and prototypes mean something."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from data.root import PROTOTYPES, Root
from data.shards import GroupSample, shard_name
from data.store import Store
from tests import handmade

VECTORS = np.eye(3, 4, dtype=np.float32)  # prototypes of the three classes


def features_of(record: dict[str, Any]) -> np.ndarray:
    """What CLIP would say of a series that shows exactly its mixture, [A, 4]."""
    pairs = [[alpha, 1 - alpha] for alpha in record["alphas"]]
    return np.array(record.get("mixture", pairs)) @ VECTORS[record["classes"]]


def root_of(
    folder: Path | str,
    shards: Sequence[Sequence[GroupSample]],
    *,
    features: dict[int, np.ndarray] | None = None,
    names: Sequence[str] = handmade.NAMES,
) -> Root:
    """A root of these shards, indexed.

    Args:
        features: by group those that differ from `features_of`.
    """
    store, first = Store(str(folder)), 0
    count, groups = len(shards[0][0].images), sum(map(len, shards))
    plan = handmade.make_plan(len(shards), groups, count, class_names=list(names))
    plan["config"] = {"shards": {"groups_per_shard": len(shards[0])}, "annotation": {}}
    store.put("plan.json", json.dumps(plan).encode())
    store.put(PROTOTYPES, save({"prototypes": VECTORS}))
    for shard, samples in enumerate(shards):
        tar = handmade.tar_of(*samples)
        size = {"first": first, "groups": len(samples), "count": count}
        record = handmade.put_shard(store, shard, tar, **size)
        rows = [(features or {}).get(s.record["group"], features_of(s.record)) for s in samples]
        _put_features(store, record, np.stack(rows))
        first += len(samples)
    root = Root(store.url)
    root.write_index()
    return root


def _put_features(store: Store, record: dict[str, Any], values: np.ndarray) -> None:
    """Replace the features of a committed shard."""
    content = save({"features": values.astype(np.float16)})
    digest = hashlib.sha256(content).hexdigest()
    stem = shard_name(record["shard"])
    name = f"{stem}-{digest[:8]}.features.safetensors"
    store.put(name, content)
    record["features"] = {"name": name, "sha256": digest, "bytes": len(content)}
    store.put(f"{stem}.json", json.dumps(record).encode())
