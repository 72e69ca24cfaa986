"""One pinned index of a root, opened once for all readers: its shards, labels and features."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from semix.data.errors import InputError
from semix.data.features import FEATURES, read_features
from semix.data.flags import ExcludedSeries, read_excluded
from semix.data.formats import (
    PROTOTYPES,
    SeriesLabels,
    SeriesRecord,
    ShardEntry,
)
from semix.data.index import Index, open_index
from semix.data.label_sets import LabelSet, NotLabelled, features_file
from semix.data.root import Root
from semix.data.tar import GroupSample, read_shard
from semix.data.tensors import open_sealed
from semix.data.threads import mapped

if TYPE_CHECKING:  # torch costs seconds
    from torch import Tensor

Labels = Mapping[int, SeriesLabels]  # labels of one shard in a label set, by group number

LABEL_FILES_AT_ONCE = 16  # label files read at once, one per shard


class PinnedRoot:
    """One index of a root, with the labels in its shards or those of a label set.

    The index decides what is read, also when more shards are committed meanwhile. When
    it is pickled to another process, that opens the same index.

    Args:
        index: name of the index; the newest one by default.
        labels: digest of a label set, or its beginning.
        scale: sharpen the raw weights with it; None takes the labels as stored.
        flags: number of files of flags to read, as a run pinned them; None reads all there are.
    Attributes:
        index: its name; digest: its fingerprint; pinned: its content.
        shards: its entries, ascending.
        label_set: the one in use, or None.
    Raises:
        InputError: no index yet; an index or label set that does not exist, is of another plan
            or lacks a shard; or a scale for labels of more than two classes.
        ValueError: the index is damaged.
    """

    def __init__(
        self,
        root: Root,
        *,
        index: str | None = None,
        labels: str | None = None,
        scale: float | None = None,
        flags: int | None = None,
    ) -> None:
        self.root, self.store, self.scale = root, root.store, scale
        self._flags = flags
        self.class_names: tuple[str, ...] = tuple(root.plan.class_names)
        num_mixed = root.plan.classes_per_group
        if scale is not None and num_mixed > 2:
            remedy = f"{root.url} mixes {num_mixed} classes, whose labels stay as stored"
            raise InputError("scale", scale, remedy)
        self.pinned = _open(root, index)
        self.index, self.digest, self.shards = (
            self.pinned.name,
            self.pinned.digest,
            self.pinned.shards,
        )
        self.label_set = None if labels is None else LabelSet(root, labels)
        if self.label_set is not None:
            labelled = set(self.store.list(self.label_set.folder))
            names = ((self.label_set.name(s.shard), s.shard) for s in self.shards)
            self._check_labelled([shard for name, shard in names if name not in labelled])

    def __reduce__(self) -> tuple[Any, ...]:
        label_digest = self.label_set.digest if self.label_set else None
        return _reopen, (self.root.url, self.index, label_digest, self.scale, self._flags)

    @cached_property
    def excluded(self) -> ExcludedSeries:
        """The series that people excluded.

        Raises:
            InputError: a file of flags is missing, damaged, or of a newer version of semix.
        """
        excluded = read_excluded(self.root, count=self._flags)
        self._flags = excluded.count  # for copies of this in other processes
        return excluded

    def samples(self, shard: ShardEntry) -> Iterator[GroupSample]:
        """The series of a shard, with the labels in use.

        Raises:
            InputError: the label set has no labels of these images.
            ValueError: the shard or its labels are damaged, or not what the index says.
            FileNotFoundError: there is no such tar.
        """
        set_labels = next(self.labels([shard]))
        for sample in read_shard(self.store, shard, num_classes=len(self.class_names)):
            record = sample.record
            if set_labels is not None:
                try:
                    record = self.relabelled(record, set_labels)
                except ValueError as error:
                    assert self.label_set is not None
                    name = self.label_set.name(shard.shard)
                    raise ValueError(f"{name}: {error}") from None
            if self.scale is not None:
                record = record.model_copy(update={"labels": _sharpened(record, self.scale)})
            yield replace(sample, record=record)

    def labels(self, shards: Sequence[ShardEntry]) -> Iterator[Labels | None]:
        """The labels of each of these shards in the label set, or None for each without one."""
        if self.label_set is None:
            yield from (None for _ in shards)
            return
        yield from mapped(self._labels_of, shards, threads=LABEL_FILES_AT_ONCE)

    def relabelled(self, record: SeriesRecord, labels: Labels) -> SeriesRecord:
        """The record with the labels of a label set instead of its own.

        Raises:
            ValueError: the set has no labels for this series, or they do not fit it.
        """
        group, replacement = record.group, labels.get(record.group)
        if replacement is None or len(replacement.weights) != len(record.alphas):
            raise ValueError(f"group {group}: the label set has no labels, or too many, for it")
        largest = max(target for label in replacement.labels for target, _ in label)
        if largest >= len(self.class_names):
            plan = f"the plan has {len(self.class_names)}"
            raise ValueError(f"group {group}: a label names class {largest}, {plan}")
        return record.with_labels(replacement)

    def features(self, shard: ShardEntry) -> "Tensor":
        """CLIP features from which the labels in use were computed, float32 [G, A, D].

        Raises:
            ValueError: the file is missing, damaged, or of another number of groups.
        """
        import torch

        file, images = features_file(shard, self.label_set), self.root.plan.images_per_group
        arrays = read_features(self.store, file, groups=shard.groups, images=images)
        features = torch.from_numpy(arrays[FEATURES]).float()
        return features / features.norm(dim=-1, keepdim=True) if self._unit_length else features

    @cached_property
    def prototypes(self) -> "Tensor":
        """Class prototypes, float32 [K, D], of the encoder that the features come from.

        Raises:
            InputError: they are missing.
            ValueError: they are damaged.
        """
        name = PROTOTYPES if self.label_set is None else self.label_set.prototypes
        try:
            content = self.store.get(name)
        except FileNotFoundError:
            raise InputError("url", self.root.url, f"holds no {name}; run `semix resume`") from None
        import torch

        arrays, _ = open_sealed(content, where=name)
        return torch.from_numpy(arrays["unit" if self._unit_length else "prototypes"])

    def _labels_of(self, shard: ShardEntry) -> Labels:
        assert self.label_set is not None
        try:
            return self.label_set.labels(shard.shard, images=shard.sha256)
        except NotLabelled:  # it has none, or labels of earlier images of this shard
            self._check_labelled([shard.shard])
            raise

    def _check_labelled(self, shards: Sequence[int]) -> None:
        assert self.label_set is not None
        if shards:
            problem = (
                f"has no labels for {len(shards):,} shards of the index, shard {shards[0]} first"
            )
            remedy = f"{problem}; run `semix relabel {self.root.url}` with its settings again"
            raise InputError("labels", self.label_set.digest[:12], remedy)

    @property
    def _unit_length(self) -> bool:
        """Whether features and prototypes are normalised before they are compared."""
        if self.label_set is None:
            return self.root.plan.normalize
        return bool(self.label_set.record.annotation.get("normalize", False))


def shard_urls(url: str, *, index: str | None = None) -> list[str]:
    """Paths or URLs of the tars that an index of a root pins, by default the newest index.

    Raises:
        InputError, ValueError: as `PinnedRoot`.
    """
    pinned = PinnedRoot(Root(url), index=index)
    return [f"{pinned.root.url}/{shard.tar}" for shard in pinned.shards]


def _open(root: Root, name: str | None) -> Index:
    names = root.indices()
    if not names:
        raise InputError("url", root.url, "is not finished; run `semix resume` first")
    name = name or names[-1]
    if name not in names:
        remedy = f"is not in {root.url}, which has: {', '.join(names)}"
        raise InputError("index", name, remedy)
    pinned_index = open_index(root.store, name)
    if pinned_index.plan != root.plan.digest:
        raise InputError("index", name, f"is of another plan than {root.url}")
    if not pinned_index.shards:
        raise InputError("index", name, "lists no shard; run `semix resume` first")
    return pinned_index


def _reopen(
    url: str, index: str, labels: str | None, scale: float | None, flags: int | None
) -> PinnedRoot:
    return PinnedRoot(Root(url), index=index, labels=labels, scale=scale, flags=flags)


def _sharpened(record: SeriesRecord, scale: float) -> list[list[tuple[int, float]]]:
    import torch  # late, because it costs seconds

    from semix.data.labels import sharpen

    first, second = record.classes
    probabilities = sharpen(torch.tensor(record.weights, dtype=torch.float32), scale).tolist()
    return [[(first, probability), (second, 1 - probability)] for probability in probabilities]
