"""MixedDataset: the committed groups of one pinned index, as training samples."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.errors import InputError
from data.exclusion import Exclusion
from data.fingerprint import fingerprint
from data.mixed.draws import ClassIndex, end_and_inner
from data.mixed.images import StoredImages, images_at, open_images
from data.mixed.pinned import Groups, pinned_index, read_groups
from data.mixed.set_labels import open_label_set
from data.mixed.shard_files import ShardFiles
from data.mixed.soft_labels import SoftLabels, sharpened
from data.root import Root
from data.shard_cache import CACHE_LIMIT, ShardCache

MEMORY_LIMIT = 8 * 2**30  # bytes of decoded images
MOST_THREADS = 16


class MixedDataset(Dataset[dict[str, Any]]):
    """All groups of one pinned index: G groups of A images, K classes.

    The index decides what is read, whatever is committed meanwhile. Images are decoded once
    into memory where they fit, else read from the shards when they are asked for: in place from
    a local root, through copies in a cache folder from another.

    Attributes:
        images: uint8 [G, A, H, W, 3], a tensor, or `StoredImages`, which is indexed by
            `[group, position]`; `in_memory` tells.
        alphas, weights: float32 [G, A], of the first class in the conditioning and in CLIP's
            projection; classes: int64 [G, k], the classes of each group, two but in a simplex;
            mixtures: float32 [G, A, k], the conditioning weights of all of them.
        soft_labels: the labels, sparse.
        groups: the JSON record of each group without its labels; numbers: int64 [G], their
            group numbers, which stay as they are while a root grows.
        shard_sizes: how many groups of each shard are read, in their order.
        digest: of the index; series_digest: of the index and what the exclusion keeps of it;
            label_digest: of the label set in use, or None.

    Args:
        index: name of the index to pin; the newest one by default.
        scale: sharpen the raw weights anew; None takes the labels as stored.
        labels: digest of a label set, or its beginning; None takes the labels in the shards.
        exclude: rules for groups to leave out.
        side: scale images to so many pixels when they are decoded; None leaves them as stored.
        memory_limit: bytes of decoded images that may be kept in memory.
        cache: where copies of remote shards are kept; `cache_folder()/shards` by default.
        cache_limit: bytes of such copies.
        threads: that decode; as many as there are cores by default, at most 16.
    Raises:
        InputError: no index yet, an index or label set that is not there or lacks a shard,
            rules that leave nothing, a scale for labels of more than two classes, or a side for
            images that are not square.
        ValueError: a shard does not read as its index says; names it.
    """

    def __init__(
        self,
        url: str,
        *,
        index: str | None = None,
        scale: float | None = None,
        labels: str | None = None,
        exclude: Exclusion | None = None,
        side: int | None = None,
        memory_limit: int = MEMORY_LIMIT,
        cache: Path | None = None,
        cache_limit: int = CACHE_LIMIT,
        threads: int | None = None,
    ) -> None:
        root = Root(url)
        self.url = root.url
        self.shared = root.store.shared
        self.class_names: tuple[str, ...] = tuple(root.plan["class_names"])
        pinned = pinned_index(root, index)
        self.index_name, self.digest = pinned.name, pinned.digest
        shards = list(pinned.shards())
        label_set = None if labels is None else open_label_set(root, labels, shards)
        self.exclude = exclude
        self.label_digest = label_set.digest if label_set else None
        copies = None if root.store.local else ShardCache(cache, limit=cache_limit)
        files = ShardFiles(root.store, shards, cache=copies)
        threads = threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)
        found = read_groups(
            root,
            self.index_name,
            files,
            label_set=label_set,
            exclude=exclude,
            threads=threads,
        )
        self._keep(found)
        self.soft_labels = found.labels if scale is None else self._sharpened(scale)
        self._of_class = ClassIndex(self.classes, self.num_classes)
        numbers = self.numbers.numpy()
        stored = open_images(
            files, found.shards, found.places, numbers=numbers, side=side, threads=threads
        )
        self.in_memory = stored.nbytes <= memory_limit
        self.images: Tensor | StoredImages = stored.in_memory() if self.in_memory else stored

    def _keep(self, found: Groups) -> None:
        self.groups = found.records
        self.alphas = torch.tensor([g["alphas"] for g in self.groups], dtype=torch.float32)
        self.weights = torch.tensor([g["weights"] for g in self.groups], dtype=torch.float32)
        self.classes = torch.tensor([g["classes"] for g in self.groups], dtype=torch.int64)
        self.mixtures = torch.tensor([_mixture(g) for g in self.groups], dtype=torch.float32)
        self.numbers = torch.tensor([g["group"] for g in self.groups], dtype=torch.int64)
        self.series_digest = fingerprint([self.digest, self.numbers.tolist()])
        self.shard_sizes: list[int] = np.unique(found.shards, return_counts=True)[1].tolist()

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def labels(self) -> Tensor:
        """Soft labels, float32 [G, A, K], made anew at each call: with many classes large.

        `soft_labels` gives those of single images.
        """
        groups, positions = torch.meshgrid(
            torch.arange(len(self)), torch.arange(self.alphas.shape[1]), indexing="ij"
        )
        return self.soft_labels.dense(groups, positions)

    def __len__(self) -> int:
        """Groups."""
        return len(self.groups)

    def __getitem__(self, group: int) -> dict[str, Any]:
        """images uint8 [A, H, W, 3], labels float32 [A, K], alphas, weights [A], group number."""
        positions = torch.arange(self.alphas.shape[1])
        where = torch.full_like(positions, group)
        images, labels = self.read(where, positions)
        return {
            "images": images,
            "labels": labels,
            "alphas": self.alphas[group],
            "weights": self.weights[group],
            "group": int(self.numbers[group]),
        }

    def draw(
        self,
        targets: Tensor,
        *,
        rng: torch.Generator,
        class_matched: bool = True,
        count: int = 2,
    ) -> tuple[Tensor, Tensor]:
        """An end point and interior images of one random group for each real image.

        Args:
            targets: classes of the real images, int64 [B].
            rng: decides alone what is drawn; `generator_for(seed, step)` makes that a function
                of the step, whoever draws.
            count: images n of each group.
        Returns:
            images uint8 [B, n, H, W, 3] and soft labels float32 [B, n, K].
        """
        group, position = self.choose(targets, rng=rng, class_matched=class_matched, count=count)
        return self.read(group, position)

    def read(self, group: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Images and soft labels at these places, which broadcast together.

        Returns:
            uint8 [..., H, W, 3] and float32 [..., K].
        """
        labels = self.soft_labels.dense(group, position)  # refuses places that are not there
        return images_at(self.images, group, position), labels

    def choose(
        self,
        targets: Tensor,
        *,
        rng: torch.Generator,
        class_matched: bool = True,
        count: int = 2,
    ) -> tuple[Tensor, Tensor]:
        """What `draw` draws, without reading an image.

        As CSM's loader: a group that contains the real image's class; of its images, ordered by
        the label of that class, the most certain one and a random one of those between the
        ends. Without `class_matched` any group, and a random one of its classes.

        Args:
            targets: classes of the real images, int64 [B].
            count: images n of each group, as `end_and_inner` takes them.
        Returns:
            group int64 [B, 1] and position int64 [B, n].
        """
        if class_matched:
            group, own = self._groups_for(targets, rng), targets
        else:
            group = torch.randint(len(self), targets.shape, generator=rng)
            side = torch.randint(self.classes.shape[1], group.shape, generator=rng)
            own = self.classes[group, side]
        return group[:, None], end_and_inner(self.soft_labels, group, own, rng=rng, count=count)

    def refuse_missing(self, targets: Tensor) -> None:
        """Raises InputError if there is no group to draw for one of these classes, int64 [B]."""
        missing = self._of_class.missing(targets)
        if missing is None:
            return
        found = f"has no group of class {self.class_names[missing]!r}"
        if self.exclude is not None and (rules := self.exclude.rules()):
            given = ", ".join(f"{name} {value}" for name, value in rules.items())
            raise InputError("mixed.exclude", given, f"{self.url} then {found}; ease a rule")
        remedy = f"{found}; make some, or set mixed.class_matched to false"
        raise InputError("mixed.url", self.url, remedy)

    def _groups_for(self, targets: Tensor, rng: torch.Generator) -> Tensor:
        self.refuse_missing(targets)
        return self._of_class.draw(targets, rng)

    def _sharpened(self, scale: float) -> SoftLabels:
        mixed = self.classes.shape[1]
        if mixed > 2:
            remedy = f"{self.url} mixes {mixed} classes, whose labels stay as stored"
            raise InputError("mixed.scale", scale, remedy)
        return sharpened(self.weights, self.classes, scale, num_classes=self.num_classes)


def _mixture(record: dict[str, Any]) -> list[list[float]]:
    pairs = [[alpha, 1 - alpha] for alpha in record["alphas"]]
    return record.get("mixture", pairs)
