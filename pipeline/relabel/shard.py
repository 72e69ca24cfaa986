"""New labels for the images of one shard, committed in one object."""

from collections.abc import Callable, Mapping
from typing import Any

from data.label_sets import LabelSet
from pipeline.annotate import Annotator
from pipeline.plan import BuildPlan, MixGroup
from pipeline.relabel.batched import annotate_many
from pipeline.relabel.features import Features, encode_images, read_stored, store_features
from pipeline.relabel.sets import IMAGES, ROOT

Record = Mapping[str, Any]


def label_shard(
    record: Record,
    *,
    labels: LabelSet,
    plan: BuildPlan,
    annotator: Annotator,
    beat: Callable[[], None] = lambda: None,
) -> bool:
    """Label the images of one committed shard; False if they are labelled already.

    Args:
        record: commit record of the shard.
    Raises:
        ValueError: its features or its tar are damaged, or other ones than recorded.
    """
    first = record["first"]
    groups = [plan.group(index) for index in range(first, first + record["groups"])]
    features, file = _features(record, groups, labels=labels, annotator=annotator, beat=beat)
    parts = annotate_many(annotator, features, groups)
    found = [{"group": group.index, **part} for group, part in zip(groups, parts, strict=True)]
    return labels.commit(record["shard"], images=record["sha256"], groups=found, features=file)


def _features(
    record: Record,
    groups: list[MixGroup],
    *,
    labels: LabelSet,
    annotator: Annotator,
    beat: Callable[[], None],
) -> tuple[Features, dict[str, Any] | None]:
    """Features of the shard, and the file that this set keeps them in, if it does."""
    source, store = labels.plan["features"], labels.store
    if source == ROOT:
        return read_stored(store, record["features"], groups), None
    if source != IMAGES:
        return read_stored(store, _of_other_set(labels, source, record), groups), None
    batch = labels.plan["batch"]
    features = encode_images(store, record, groups, annotator=annotator, batch=batch, beat=beat)
    return features, store_features(store, features, stem=labels.stem(record["shard"]))


def _of_other_set(labels: LabelSet, digest: str, record: Record) -> Record:
    head = LabelSet(labels.root, digest).head(record["shard"])
    if head is None or head["images"] != record["sha256"] or head.get("features") is None:
        raise ValueError(
            f"labels/{digest[:12]} has no features of shard {record['shard']} as it is now; "
            "complete that set first"
        )
    return dict(head["features"])
