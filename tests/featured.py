"""Handmade roots whose stored features and prototypes mean something."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from semix.data.formats import (
    PROTOTYPES,
    File,
    LabelSetRecord,
    SeriesLabels,
    SeriesRecord,
)
from semix.data.label_sets import create_set
from semix.data.root import Root
from semix.data.store import Store
from semix.data.tar import GroupSample, read_shard

from tests import handmade
from tests.data import whole_roots

VECTORS = np.eye(3, 4, dtype=np.float32)  # prototypes of the three classes


def features_of(record: SeriesRecord) -> np.ndarray:
    """What CLIP would say of a series that shows exactly its mixture, [A, 4]."""
    return np.array(record.mixtures) @ VECTORS[record.classes]


def root_of(
    folder: Path | str,
    shards: Sequence[Sequence[GroupSample]],
    *,
    features: dict[int, np.ndarray] | None = None,
    names: Sequence[str] = handmade.NAMES,
    left_out: Sequence[Mapping[int, str]] = (),
) -> Root:
    """A root of these shards, indexed.

    Args:
        features: by group those that differ from `features_of`.
        left_out: of each shard the series that are not in it, and why.
    """
    store, first = Store(str(folder)), 0
    left_out = left_out or [{} for _ in shards]
    sizes = [len(samples) + len(gone) for samples, gone in zip(shards, left_out, strict=True)]
    count, groups = len(shards[0][0].images), sum(sizes)
    plan = handmade.make_plan(len(shards), groups, count, class_names=list(names))
    plan["config"]["shards"]["groups_per_shard"] = sizes[0]
    plan["config"]["annotation"] = {}
    store.put("plan.json", json.dumps(plan).encode())
    store.put(PROTOTYPES, whole_roots.prototypes(VECTORS))
    for shard, samples in enumerate(shards):
        tar = handmade.tar_of(*samples)
        rows = [(features or {}).get(s.record.group, features_of(s.record)) for s in samples]
        handmade.put_shard(
            store,
            shard,
            tar,
            first=first,
            groups=len(samples),
            count=count,
            features=np.stack(rows),
            left_out=left_out[shard],
        )
        first += sizes[shard]
    root = Root(store.url)
    root.write_index()
    return root


def label_set(
    root: Root,
    own: dict[int, np.ndarray],
    *,
    origin: str = "images",
    prototypes: float = 1.0,
) -> str:
    """Labels by alpha over all shards of a root, as by another encoder; the set's digest.

    Args:
        own: by group the features that differ from `features_of`.
        origin: where the set says that features come from; `images` stores them beside it.
        prototypes: how long those of the set are.
    """
    record = {"plan": root.plan.digest, "features": origin, "batch": 1}
    record |= {"annotation": {}, "encoders": {}}
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    labels = create_set(root, LabelSetRecord(digest=digest, **record))
    root.store.put(labels.prototypes, save({"prototypes": prototypes * VECTORS}))
    for shard, images in root.committed().items():
        records = [s.record for s in read_shard(root.store, images)]
        groups = [SeriesLabels(group=r.group, **r.parts()) for r in records]
        rows = np.stack([own.get(r.group, features_of(r)) for r in records])
        file = _stored(root.store, labels.stem(shard), rows) if origin == "images" else None
        labels.commit(shard, images=images.sha256, groups=groups, features=file)
    return labels.digest


def _stored(store: Store, stem: str, values: np.ndarray) -> File:
    content = save({"features": values.astype(np.float16)})
    digest = hashlib.sha256(content).hexdigest()
    name = f"{stem}-{digest[:8]}.features.safetensors"
    store.put(name, content)
    return File(name=name, sha256=digest, bytes=len(content))
