"""New labels for the images of one shard, committed in one object."""

from collections.abc import Callable, Mapping
from typing import Any

from data.label_sets import LabelSet
from pipeline.annotate import Annotator
from pipeline.plan import BuildPlan, MixGroup
from pipeline.relabel.batched import annotate_many
from pipeline.relabel.features import Features, encode_images, read_stored, store_features
from pipeline.relabel.sets import IMAGES, ROOT
from pipeline.work import Making

Record = Mapping[str, Any]


def label_shard(
    record: Record,
    *,
    labels: LabelSet,
    plan: BuildPlan,
    annotator: Annotator,
    beat: Callable[[], None] = lambda: None,
) -> Making[bool]:
    """Label the images of one committed shard; False if they are labelled already.

    Pauses once they are labelled and only the labels are left to publish.

    Args:
        record: commit record of the shard.
    Raises:
        ValueError: its features or its tar are damaged, or other ones than recorded.
    """
    first = record["first"]
    groups = [plan.group(index) for index in range(first, first + record["groups"])]
    features = _features(record, groups, labels=labels, annotator=annotator, beat=beat)
    parts = annotate_many(annotator, features, groups)
    found = [{"group": group.index, **part} for group, part in zip(groups, parts, strict=True)]
    yield
    file = None
    if labels.plan["features"] == IMAGES:  # they are new: this set keeps them
        file = store_features(labels.store, features, stem=labels.stem(record["shard"]))
    return labels.commit(record["shard"], images=record["sha256"], groups=found, features=file)


def _features(
    record: Record,
    groups: list[MixGroup],
    *,
    labels: LabelSet,
    annotator: Annotator,
    beat: Callable[[], None],
) -> Features:
    source, store = labels.plan["features"], labels.store
    if source == ROOT:
        return read_stored(store, record["features"], groups)
    if source != IMAGES:
        return read_stored(store, _of_other_set(labels, source, record), groups)
    batch = labels.plan["batch"]
    return encode_images(store, record, groups, annotator=annotator, batch=batch, beat=beat)


def _of_other_set(labels: LabelSet, digest: str, record: Record) -> Record:
    head = LabelSet(labels.root, digest).head(record["shard"])
    if head is None or head["images"] != record["sha256"] or head.get("features") is None:
        raise ValueError(
            f"labels/{digest[:12]} has no features of shard {record['shard']} as it is now; "
            "complete that set first"
        )
    return dict(head["features"])
