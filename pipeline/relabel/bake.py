"""Bake labels into a new root: the same images byte for byte, other labels in each KEY.json."""

import hashlib
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from data.label_records import with_labels
from data.label_sets import LabelSet
from data.root import Root, spec_digest
from data.shards import GroupSample, shard_name, write_tar
from data.store import Store
from pipeline.plan import BuildPlan
from pipeline.relabel.verified import verified_series
from pipeline.stopwatch import Stopwatch

Record = dict[str, Any]


def bake_shard(
    shard: int, *, source: Root, labels: LabelSet | None, target: Root, plan: BuildPlan
) -> bool:
    """Copy one shard with other labels and commit it; False if its source is not ready.

    One series is in memory at a time.

    Args:
        labels: of the source; None for those its images carry.
        plan: of the source.
    Raises:
        ValueError: the tar, the features or the labels are damaged, or not as recorded.
    """
    record = source.record(shard)
    if record is None:
        return False
    clock = Stopwatch()
    name = f"{shard_name(shard)}.tar"
    with clock.stage("write"), target.store.staging(name) as staged:
        with staged.open("wb") as file:
            write_tar(file, _series(record, source=source, labels=labels, plan=plan))
        with staged.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        tar = f"{shard_name(shard)}-{digest[:8]}.tar"
        size = staged.stat().st_size
        target.store.publish(staged, tar)
    described = {"tar": tar, "sha256": digest, "bytes": size}
    described["features"] = _copy_features(
        _features_of(record, labels), shard, source=source.store, target=target.store
    )
    target.commit(
        {
            **described,
            "spec": spec_digest(target.plan["digest"], shard),
            "shard": shard,
            "groups": record["groups"],
            "first": record["first"],
            "seconds": dict(clock.seconds),
            "wall_seconds": clock.wall,
            "tflop": None,
            "attempt": 1 + target.attempts(shard),
            "worker": f"{socket.gethostname()}:{os.getpid()}",
            "versions": record.get("versions", {}),  # of what made the images
            "prototypes": target.prototypes_sha256,
        }
    )
    return True


def _series(
    record: Record, *, source: Root, labels: LabelSet | None, plan: BuildPlan
) -> Iterator[GroupSample]:
    groups = [plan.group(record["first"] + offset) for offset in range(record["groups"])]
    new = labels.labels(record["shard"]) if labels is not None else None
    for sample in verified_series(source.store, record, groups):
        told = sample.record
        if new is not None:
            told = with_labels(told, new[told["group"]])
        yield GroupSample(told, sample.images, sample.extension)


def _features_of(record: Record, labels: LabelSet | None) -> Mapping[str, Any]:
    """The file of features that these labels were made from."""
    if labels is None or labels.plan["features"] == "root":
        return dict(record["features"])
    digest = labels.plan["features"]
    keeper = labels if digest == "images" else LabelSet(labels.root, digest)
    head = keeper.head(record["shard"])
    if head is None or head["images"] != record["sha256"]:
        raise ValueError(f"{keeper.name(record['shard'])}: names no features of these images")
    return dict(head["features"])


def _copy_features(file: Mapping[str, Any], shard: int, *, source: Store, target: Store) -> Record:
    content = source.get(file["name"])
    if hashlib.sha256(content).hexdigest() != file["sha256"]:
        raise ValueError(f"{file['name']}: does not have the recorded SHA-256")
    name = f"{shard_name(shard)}-{file['sha256'][:8]}.features.safetensors"
    target.put(name, content)
    return {"name": name, "sha256": file["sha256"], "bytes": len(content)}
