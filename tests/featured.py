"""Handmade roots whose features fit their labels: each is a mixture of two prototypes."""

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
    shard_stem,
)
from semix.data.label_sets import create_set
from semix.data.root import Root
from semix.data.store import Store
from semix.data.tar import GroupSample, read_shard
from tests import handmade
from tests.data import whole_roots
from tests.handmade import committed

VECTORS = np.eye(3, 4, dtype=np.float32)  # prototypes of the three classes


def features_of(record: SeriesRecord) -> np.ndarray:
    """The features that CLIP would give images that show exactly their mixtures, [A, 4]."""
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
        features: by series, where they differ from `features_of`.
        left_out: per shard the series that are not in it, with the reason.
    """
    store, first = Store(str(folder)), 0
    left_out = left_out or [{} for _ in shards]
    sizes = [len(samples) + len(omitted) for samples, omitted in zip(shards, left_out, strict=True)]
    count, num_series = len(shards[0][0].images), sum(sizes)
    plan = handmade.make_plan(len(shards), num_series, count, class_names=list(names))
    plan["groups_per_shard"] = sizes[0]
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
    features: dict[int, np.ndarray],
    *,
    source: str = "images",
    prototype_length: float = 1.0,
) -> str:
    """Write a label set over all shards of a root, as by another encoder; returns its digest.

    Args:
        features: by series, where they differ from `features_of`.
        source: where the set says that its features come from; `images` stores them beside it.
        prototype_length: the norm of the set's prototypes.
    """
    record = {"plan": root.plan.digest, "features": source, "batch": 1}
    record |= {"annotation": {}, "encoders": {}}
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    labels = create_set(root, LabelSetRecord(digest=digest, **record))
    root.store.put(labels.prototypes, whole_roots.prototypes(prototype_length * VECTORS))
    for shard, images in committed(root).items():
        records = [s.record for s in read_shard(root.store, images)]
        series_labels = [SeriesLabels(group=r.group, **r.label_fields()) for r in records]
        rows = np.stack([features.get(r.group, features_of(r)) for r in records])
        file = (
            _stored(root.store, shard_stem(shard, labels.folder), rows)
            if source == "images"
            else None
        )
        labels.commit(shard, images=images.sha256, groups=series_labels, features=file)
    return labels.digest


def _stored(store: Store, stem: str, values: np.ndarray) -> File:
    content = save({"features": values.astype(np.float16)})
    digest = hashlib.sha256(content).hexdigest()
    name = f"{stem}-{digest[:8]}.features.safetensors"
    store.put(name, content)
    return File(name=name, sha256=digest, bytes=len(content))
