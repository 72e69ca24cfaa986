"""MixedDataset: the committed series of one pinned index, as training samples and CSM's draws."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.fingerprint import fingerprint
from semix.data.formats import SeriesRecord
from semix.data.labels import SoftLabels, by_ratio, joined, sharpened, sparse_arrays
from semix.data.machine import cores
from semix.data.pinned import Pinned
from semix.data.root import Root
from semix.data.series_filter import SeriesFilter
from semix.data.shard_files import CACHE_LIMIT, ShardCache, ShardContents, ShardFiles
from semix.data.stored_images import StoredImages, images_at, open_images
from semix.data.threads import mapped
from torch import Tensor
from torch.utils.data import Dataset

MEMORY_LIMIT = 8 * 2**30  # bytes of decoded images
MOST_THREADS = 16

Sample = dict[str, Any]


class MixedDataset(Dataset[Sample]):
    """All groups of one pinned index: G groups of A images, K classes.

    The index decides what is read, whatever is committed meanwhile. Images are decoded once
    into memory where they fit, else read from the shards when they are asked for: in place from
    a local root, through copies in a cache folder from another.

    A sample of torch's DataLoader is a group; `by_image()` has one for each image. `draw` gives
    what CSM draws beside a real image.

    Attributes:
        images: uint8 [G, A, H, W, 3], a tensor, or `StoredImages`, which is indexed by
            `[group, position]`; `in_memory` tells.
        alphas, weights: float32 [G, A], of the first class in the conditioning and in CLIP's
            projection; classes: int64 [G, k], the classes of each group, two but in a simplex;
            mixtures: float32 [G, A, k], the conditioning weights of all of them.
        soft_labels: the labels, sparse.
        groups: the record of each group without its labels; numbers: int64 [G], their
            group numbers, which stay as they are while a root grows.
        shard_sizes: how many groups of each shard are read, in their order.
        digest: of the index; series_digest: of the index and what the exclusion keeps of it;
            label_digest: of the label set in use, or None.

    Args:
        index: name of the index to pin; the newest one by default.
        scale: sharpen the raw weights anew; None takes the labels as stored.
        rule: "mixing_ratio" takes the conditioning weights for labels, whatever is stored.
        labels: digest of a label set, or its beginning; None takes the labels in the shards.
        exclude: rules for groups to leave out.
        side: scale images to so many pixels when they are decoded; None leaves them as stored.
        memory_limit: bytes of decoded images that may be kept in memory.
        cache: where copies of remote shards are kept; `cache_folder()/shards` by default.
        cache_limit: bytes of such copies.
        threads: that decode; as many as there are cores by default, at most 16.
    Raises:
        InputError: no index yet, an index or label set that is not there or lacks a shard,
            rules that leave nothing, a scale or label set beside another rule, a scale for labels
            of more than two classes, or a side for images that are not square.
        ValueError: a shard does not read as its index says; names it.
    """

    def __init__(
        self,
        url: str,
        *,
        index: str | None = None,
        scale: float | None = None,
        labels: str | None = None,
        rule: Literal["stored", "mixing_ratio"] = "stored",
        exclude: Exclusion | None = None,
        side: int | None = None,
        memory_limit: int = MEMORY_LIMIT,
        cache: Path | None = None,
        cache_limit: int = CACHE_LIMIT,
        threads: int | None = None,
    ) -> None:
        if rule != "stored" and (scale is not None or labels is not None):
            raise InputError("rule", rule, "takes no stored labels; leave scale and labels out")
        source = Pinned(Root(url), index=index, labels=labels, scale=scale)
        self.url, self.class_names = source.root.url, source.class_names
        self.index_name, self.digest = source.index, source.digest
        self.label_digest = source.label_set.digest if source.label_set else None
        self.exclude = exclude
        copies = None if source.store.local else ShardCache(cache, limit=cache_limit)
        files = ShardFiles(source.store, source.shards, cache=copies)
        threads = threads or min(cores(), MOST_THREADS)
        found = _read_groups(source, files, exclude or Exclusion(), threads=threads)
        self._keep(found)
        self.soft_labels = found.labels
        if scale is not None:
            self.soft_labels = sharpened(
                self.weights, self.classes, scale, num_classes=self.num_classes
            )
        if rule == "mixing_ratio":
            self.soft_labels = by_ratio(self.mixtures, self.classes, num_classes=self.num_classes)
        self._of_class = ClassIndex(self.classes, self.num_classes)
        numbers = self.numbers.numpy()
        stored = open_images(
            files, found.shards, found.places, numbers=numbers, side=side, threads=threads
        )
        self.in_memory = stored.nbytes <= memory_limit
        self.images: Tensor | StoredImages = stored.in_memory() if self.in_memory else stored

    def _keep(self, found: "_Groups") -> None:
        self.groups = found.records
        self.alphas = torch.tensor([g.alphas for g in self.groups], dtype=torch.float32)
        self.weights = torch.tensor([g.weights for g in self.groups], dtype=torch.float32)
        self.classes = torch.tensor([g.classes for g in self.groups], dtype=torch.int64)
        self.mixtures = torch.tensor([g.mixtures for g in self.groups], dtype=torch.float32)
        self.numbers = torch.tensor([g.group for g in self.groups], dtype=torch.int64)
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

    def __getitem__(self, group: int) -> Sample:
        """images uint8 [A, H, W, 3], labels float32 [A, K], alphas, weights [A], group number."""
        return self.__getitems__([group])[0]

    def __getitems__(self, groups: Sequence[int]) -> list[Sample]:
        """What a DataLoader asks for: the samples of a batch, read at once."""
        images, labels = self.read(
            torch.tensor(groups)[:, None], torch.arange(self.alphas.shape[1])
        )
        return [
            {
                "images": images[row],
                "labels": labels[row],
                "alphas": self.alphas[group],
                "weights": self.weights[group],
                "group": int(self.numbers[group]),
            }
            for row, group in enumerate(groups)
        ]

    def by_image(self) -> "MixedImages":
        """The same with a sample for each image, for a DataLoader."""
        return MixedImages(self)

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
            rng: decides alone what is drawn; of `semix.data.fingerprint.generator_for(seed, step)`
                that is a function of the step, whoever draws.
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
            raise InputError("exclude", given, f"{self.url} then {found}; ease a rule")
        remedy = f"{found}; make some, or set mixed.class_matched to false"
        raise InputError("url", self.url, remedy)

    def _groups_for(self, targets: Tensor, rng: torch.Generator) -> Tensor:
        self.refuse_missing(targets)
        return self._of_class.draw(targets, rng)


class MixedImages(Dataset[Sample]):
    """The N = G A images of a MixedDataset; image n is the one at n % A of group n // A."""

    def __init__(self, mixed: MixedDataset) -> None:
        # No more than samples need: workers that are spawned get a copy of it.
        self.images, self.soft_labels, self.numbers = mixed.images, mixed.soft_labels, mixed.numbers
        self.alphas, self.weights = mixed.alphas, mixed.weights

    def __len__(self) -> int:
        return self.alphas.numel()

    def __getitem__(self, image: int | Sequence[int]) -> Sample:
        """image uint8 [H, W, 3], label float32 [K], group number, position, alpha and weight.

        Of several images at once each with another dimension in front: a whole batch, for a
        DataLoader whose sampler gives batches and whose `batch_size` is None. That is the
        quickest way, three times as quick as batches put together from samples.
        """
        number, count = torch.as_tensor(image), self.alphas.shape[1]
        group, position = number // count, number % count
        return {
            "image": images_at(self.images, group, position),
            "label": self.soft_labels.dense(group, position),
            "group": self.numbers[group],
            "position": position,
            "alpha": self.alphas[group, position],
            "weight": self.weights[group, position],
        }

    def __getitems__(self, images: Sequence[int]) -> list[Sample]:
        """What a DataLoader asks for: the samples of a batch, read at once."""
        batch = self[images]
        # Numbers of Python's are put together much faster than tensors of one number.
        columns = (v.tolist() if v.ndim == 1 else v.unbind() for v in batch.values())
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class _Groups:
    """All groups that are read, in the order of the index.

    Attributes:
        records: of each group, without its labels, which `labels` has.
        shards: int64 [G], position in the index; places: int64 [G, A, 2], offset and size.
    """

    records: list[SeriesRecord]
    shards: np.ndarray
    places: np.ndarray
    labels: SoftLabels


def _read_groups(source: Pinned, files: ShardFiles, exclude: Exclusion, *, threads: int) -> _Groups:
    """What the shards of an index hold but their images, of the series that are not left out."""
    chosen = SeriesFilter(exclude, source)
    records: list[SeriesRecord] = []
    shards: list[np.ndarray] = []
    places: list[np.ndarray] = []
    labels: list[tuple[np.ndarray, np.ndarray]] = []
    every = range(len(source.shards))
    with closing(mapped(files.contents, every, threads=threads)) as read:
        for at, contents, own in zip(every, read, source.labels(source.shards), strict=True):
            shard, found = source.shards[at], contents.records
            try:
                if own is not None:
                    found = [source.relabelled(record, own) for record in found]
                probabilities, classes = sparse_arrays([record.labels for record in found])
                _check_series([*records[:1], *found], contents, classes, source=source)
            except ValueError as error:
                raise ValueError(f"{shard.tar}: {error}; run `semix verify`") from None
            keep = np.flatnonzero(chosen.keep(shard, found))
            records += [found[row].model_copy(update={"labels": []}) for row in keep]
            shards.append(np.full(len(keep), at))
            places.append(contents.places[keep])
            labels.append((probabilities[keep], classes[keep]))
    chosen.conclude()
    found_labels = joined(labels, num_classes=len(source.class_names))
    return _Groups(records, np.concatenate(shards), np.concatenate(places), found_labels)


def _check_series(
    records: Sequence[SeriesRecord], contents: ShardContents, classes: np.ndarray, *, source: Pinned
) -> None:
    """Raises ValueError unless series are as the plan has them, and like each other."""
    images, names = source.root.plan.images_per_group, len(source.class_names)
    if contents.places.shape[1] != images:
        raise ValueError(f"{contents.places.shape[1]} images a group, the plan has {images}")
    largest = max(int(classes.max()), *(max(record.classes) for record in records))
    if largest >= names:
        raise ValueError(f"a label names class {largest}, the plan has {names}")
    kinds = {len(record.classes) for record in records}
    if len(kinds) > 1:
        raise ValueError(f"series of {min(kinds)} and of {max(kinds)} classes")


class ClassIndex:
    """Which groups contain each class, as one list with a stretch for each class.

    Args:
        classes: of each group, different ones, int64 [G, k].
    """

    def __init__(self, classes: Tensor, num_classes: int) -> None:
        of_entry = classes.flatten()
        # Stable, so that groups ascend within a class.
        self.groups = of_entry.argsort(stable=True) // classes.shape[1]
        self.counts = torch.bincount(of_entry, minlength=num_classes)
        self.starts = self.counts.cumsum(0) - self.counts

    def missing(self, targets: Tensor) -> int | None:
        """A class among the targets, int64 [B], that no group contains; None if all are there."""
        there = self.counts[targets] > 0
        return None if bool(there.all()) else int(targets[~there][0])

    def draw(self, targets: Tensor, rng: torch.Generator) -> Tensor:
        """For each target a random group that contains it, each as likely as any other.

        Args:
            targets: classes that are not missing, int64 [B].
        Returns:
            groups, int64 [B].
        """
        share = torch.rand(len(targets), generator=rng, dtype=torch.float64)
        chosen = (share * self.counts[targets]).long()
        return self.groups[self.starts[targets] + chosen]


def end_and_inner(
    labels: SoftLabels, groups: Tensor, targets: Tensor, *, rng: torch.Generator, count: int = 2
) -> Tensor:
    """Of each group the image that is most certainly of a class, and random inner ones.

    The images are ordered by the label of that class; inner ones lie between the two ends.

    Args:
        groups, targets: int64 [B].
        count: images of each group, the end and `count - 1` inner ones, which differ while the
            series has as many. A single image is the end or an inner one, by a fair coin.
    Returns:
        positions, int64 [B, count].
    """
    order = labels.of_class(groups, targets).argsort(dim=1, descending=True)  # [B, A]
    # A series of two images has no interior; its far end stands in for it.
    end, inner = order[:, :1], order[:, 1:-1] if order.shape[1] > 2 else order[:, 1:]
    both = torch.cat([end, _some(inner, max(count - 1, 1), rng)], dim=1)
    if count > 1:
        return both
    return both.gather(1, torch.randint(2, (len(groups), 1), generator=rng))


def _some(positions: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Random ones of each row; none comes again before all of its row have come."""
    rows, length = positions.shape
    if count == 1:
        return positions.gather(1, torch.randint(length, (rows, 1), generator=rng))
    shuffled = torch.rand(rows, length, generator=rng).argsort(dim=1)
    return positions.gather(1, shuffled[:, torch.arange(count) % length])
