"""What an audit reads: a pinned index, its labels, features and prototypes."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from data.errors import InputError
from data.indices import open_index
from data.label_records import with_labels
from data.label_sets import LabelSet
from data.root import PROTOTYPES, Root
from data.shards import GroupSample, read_shard
from data.stored_features import of_unit_length, read_features, read_vectors

Record = Mapping[str, Any]


class Source:
    """One index of a root, under the labels in its shards or a further label set.

    Args:
        index: name of the index; the newest by default.
        labels: digest of a label set, or its beginning.
    Raises:
        InputError: no index, none of that name, no such label set, or one that is not finished.
    """

    def __init__(self, root: Root, *, index: str | None = None, labels: str | None = None) -> None:
        self.root, self.store = root, root.store
        self.class_names: tuple[str, ...] = tuple(root.plan["class_names"])
        self.index = index or _newest(root)
        if not self.store.exists(self.index):
            there = ", ".join(root.indices()) or "none"
            raise InputError("index", self.index, f"is not in {root.url}, which has: {there}")
        pinned = open_index(self.store, self.index)
        self.digest = pinned.digest
        self.shards: list[Record] = list(pinned.shards())
        self.set = None if labels is None else _finished(LabelSet(root, labels))

    @cached_property
    def vectors(self) -> Tensor:
        """Class prototypes, float32 [K, D], of the encoder that the features come from."""
        folder = f"{self.set.folder}/" if self.set else ""
        return read_vectors(self.root, folder + PROTOTYPES, unit=self._unit)

    def features(self, shard: Record) -> Tensor:
        """The features that the shard's labels come from, float32 [G, A, D]."""
        file = shard["features"]
        if self._feature_files is not None:
            file = self._feature_files[shard["shard"]]["features"]
        return read_features(self.store, file, groups=shard["groups"], unit=self._unit)

    def samples(self, shard: Record) -> Iterator[GroupSample]:
        """The series of a shard, under the labels that are audited.

        Raises:
            ValueError: the shard is damaged, or not labelled.
            FileNotFoundError: it is not there.
        """
        labels = self._labels(shard)
        for sample in read_shard(self.store, shard, num_classes=len(self.class_names)):
            yield sample if labels is None else _relabelled(sample, labels)

    def _labels(self, shard: Record) -> Mapping[int, Any] | None:
        """The label set's labels of a shard by group; None where its own count."""
        if self.set is None:
            return None
        if self._labelled[shard["shard"]]["images"] != shard["sha256"]:
            raise ValueError("the label set has labels of other images for it")
        return self.set.labels(shard["shard"])

    @property
    def _unit(self) -> bool:
        plan = self.set.plan if self.set else self.root.plan["config"]
        return of_unit_length(plan.get("annotation", {}))

    @cached_property
    def _feature_files(self) -> Mapping[int, Record] | None:
        """By shard, where a label set stores features of its own; None: those of the images."""
        origin = self.set.plan["features"] if self.set else "root"
        if origin == "root":
            return None
        return self._labelled if origin == "images" else LabelSet(self.root, origin).committed()

    @cached_property
    def _labelled(self) -> Mapping[int, Record]:
        return {} if self.set is None else self.set.committed()


def _relabelled(sample: GroupSample, labels: Mapping[int, Any]) -> GroupSample:
    group = sample.record["group"]
    if group not in labels:
        raise ValueError(f"group {group} has no labels in the label set")
    record = with_labels(sample.record, labels[group])
    return GroupSample(record, sample.images, sample.extension)


def _newest(root: Root) -> str:
    indices = root.indices()
    if not indices:
        raise InputError("url", root.url, "is not finished; run `semix resume` first")
    return indices[-1]


def _finished(labels: LabelSet) -> LabelSet:
    missing = labels.missing()
    if missing:
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        remedy = f"lacks shards {shown}; run `semix relabel` with the same settings again"
        raise InputError("labels", labels.digest[:12], remedy)
    return labels
