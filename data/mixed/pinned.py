"""One pinned index opened: its shards, and the groups that are read from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch

from data.errors import InputError
from data.exclusion import Exclusion, kept
from data.indices import PinnedIndex, open_index
from data.label_sets import LabelSet
from data.mixed.contents import Record, ShardContents
from data.mixed.set_labels import relabelled, set_labels
from data.mixed.shard_files import ShardFiles
from data.mixed.soft_labels import SoftLabels, joined, sparse_arrays
from data.root import Root
from data.threads import mapped


@dataclass(frozen=True)
class Groups:
    """All groups that are read, in the order of the index.

    Attributes:
        records: of each group, without its labels, which `labels` has.
        shards: int64 [G], position in the index; places: int64 [G, A, 2], offset and size.
    """

    records: list[Record]
    shards: np.ndarray
    places: np.ndarray
    labels: SoftLabels


def pinned_index(root: Root, name: str | None) -> PinnedIndex:
    """An index, the newest one where none is named.

    Raises:
        InputError: the root has none yet, not this one, or one of another plan.
        ValueError: it is damaged.
    """
    if name is None:
        indices = root.indices()
        if not indices:
            raise InputError("mixed.url", root.url, "is not finished; run `semix resume` first")
        name = indices[-1]
    if not root.store.exists(name):
        raise InputError("mixed.index", name, f"is not in {root.url}")
    found = open_index(root.store, name)
    if found.plan != root.plan["digest"]:
        raise InputError("mixed.index", name, f"is of another plan than {root.url}")
    if not found.parts:
        raise InputError("mixed.index", name, "lists no shard; run `semix resume` first")
    return found


def shard_urls(url: str, *, index: str | None = None) -> list[str]:
    """The tars of a root's newest index, or of the one named: paths, or URLs of the store.

    Raises:
        InputError, ValueError: as `pinned_index`.
    """
    root = Root(url)
    return [f"{root.url}/{shard['tar']}" for shard in pinned_index(root, index).shards()]


def read_groups(
    root: Root,
    index: str,
    files: ShardFiles,
    *,
    label_set: LabelSet | None,
    exclude: Exclusion | None,
    threads: int,
) -> Groups:
    """Read what all shards of an index hold, but their images.

    Raises:
        InputError: the label set lacks a shard; what the exclusion refuses.
        ValueError: a shard is damaged, or not like the others; names it.
    """
    records: list[Record] = []
    shards: list[np.ndarray] = []
    places: list[np.ndarray] = []
    labels: list[tuple[np.ndarray, np.ndarray]] = []
    others = set_labels(label_set, files.shards) if label_set else repeat(None)
    read = mapped(files.contents, range(len(files.shards)), threads=threads)
    for at, (contents, own) in enumerate(zip(read, others, strict=False)):
        try:
            found = contents.records if own is None else relabelled(contents.records, own)
            sparse = sparse_arrays([record.pop("labels") for record in found])
            _check_series([*records[:1], *found], contents, sparse[1], root=root)
        except ValueError as error:
            raise ValueError(f"{files.shards[at]['tar']}: {error}; run `semix verify`") from None
        labels.append(sparse)
        places.append(contents.places)
        shards.append(np.full(len(found), at))
        records += found
    found_labels = joined(labels, num_classes=len(root.plan["class_names"]))
    groups = Groups(records, np.concatenate(shards), np.concatenate(places), found_labels)
    if exclude is None:
        return groups
    return _without(groups, kept(exclude, records, root=root, index=index))


def _check_series(
    records: Sequence[Record], contents: ShardContents, classes: np.ndarray, *, root: Root
) -> None:
    """Raises ValueError unless series are as the plan has them, and like each other."""
    images, names = root.plan["images_per_group"], len(root.plan["class_names"])
    if contents.places.shape[1] != images:
        raise ValueError(f"{contents.places.shape[1]} images a group, the plan has {images}")
    largest = max(int(classes.max()), *(max(record["classes"]) for record in records))
    if largest >= names:
        raise ValueError(f"a label names class {largest}, the plan has {names}")
    kinds = {len(record["classes"]) for record in records}
    if len(kinds) > 1:
        raise ValueError(f"series of {min(kinds)} and of {max(kinds)} classes")


def _without(groups: Groups, keep: Sequence[bool]) -> Groups:
    """Only the groups to keep."""
    chosen = np.flatnonzero(keep)
    return Groups(
        [groups.records[group] for group in chosen],
        groups.shards[chosen],
        groups.places[chosen],
        groups.labels.of_groups(torch.from_numpy(chosen)),
    )
