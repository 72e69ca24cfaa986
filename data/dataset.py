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
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.series_filter import SeriesFilter
from semix.data.shard_files import CACHE_LIMIT, ShardCache, ShardContents, ShardFiles
from semix.data.stored_images import StoredImages, images_at, open_images
from semix.data.threads import mapped
from torch import Tensor
from torch.utils.data import Dataset

MEMORY_LIMIT = 8 * 2**30  # bytes of decoded images
MAX_THREADS = 16

Sample = dict[str, Any]


class MixedDataset(Dataset[Sample]):
    """All groups of one pinned index: G groups of A images, K classes.

    The index decides what is read, also when more shards are committed meanwhile. Images are
    decoded once into memory where they fit, else read from the shards on access: in place from a
    local root, through copies in a cache folder from a remote one.

    A sample of torch's DataLoader is a group; `by_image()` has one sample per image. `draw` gives
    the mixed images that CSM draws for each real image.

    Attributes:
        images: uint8 [G, A, H, W, 3], a tensor, or `StoredImages`, which is indexed by
            `[group, position]`; `in_memory` tells.
        alphas, weights: float32 [G, A], of the first class in the conditioning and in CLIP's
            projection; classes: int64 [G, k], the classes of each group, two but in a simplex;
            mixtures: float32 [G, A, k], the conditioning weights of all of them.
        soft_labels: the labels, sparse.
        groups: the record of each group without its labels; numbers: int64 [G], their
            group numbers, which stay the same while a root grows.
        shard_sizes: number of groups that are read from each shard, in the order of the index.
        digest: of the index; series_digest: of the index and the series that the exclusion keeps;
            label_digest: of the label set in use, or None.

    Args:
        index: name of the index to pin; the newest one by default.
        scale: sharpen the raw weights with it; None takes the labels as stored.
        rule: "mixing_ratio" takes the conditioning weights as labels, in place of stored ones.
        labels: digest of a label set, or its beginning; None takes the labels in the shards.
        exclude: rules for groups to leave out.
        side: scale images to this many pixels when they are decoded; None leaves them as stored.
        memory_limit: bytes of decoded images that may be kept in memory.
        cache: where copies of remote shards are kept; `cache_folder()/shards` by default.
        cache_limit: bytes of such copies.
        threads: threads that decode; by default one per core, at most 16.
    Raises:
        InputError: no index yet, an index or label set that does not exist or lacks a shard,
            rules that leave nothing, a scale or label set beside another rule, a scale for labels
            of more than two classes, or a side for images that are not square.
        ValueError: a shard is not what its index says; the text names it.
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
        source = PinnedRoot(Root(url), index=index, labels=labels, scale=scale)
        self.url, self.class_names = source.root.url, source.class_names
        self.index_name, self.digest = source.index, source.digest
        self.label_digest = source.label_set.digest if source.label_set else None
        self.exclude = exclude
        copies = None if source.store.local else ShardCache(cache, limit=cache_limit)
        files = ShardFiles(source.store, source.shards, cache=copies)
        threads = threads or min(cores(), MAX_THREADS)
        loaded = _read_groups(source, files, exclude or Exclusion(), threads=threads)
        self._keep(loaded)
        self.soft_labels = loaded.labels
        if scale is not None:
            self.soft_labels = sharpened(
                self.weights, self.classes, scale, num_classes=self.num_classes
            )
        if rule == "mixing_ratio":
            self.soft_labels = by_ratio(self.mixtures, self.classes, num_classes=self.num_classes)
        self._of_class = ClassIndex(self.classes, self.num_classes)
        numbers = self.numbers.numpy()
        stored = open_images(
            files, loaded.shards, loaded.places, numbers=numbers, side=side, threads=threads
        )
        self.in_memory = stored.nbytes <= memory_limit
        self.images: Tensor | StoredImages = stored.in_memory() if self.in_memory else stored

    def _keep(self, loaded: "_Groups") -> None:
        self.groups = loaded.records
        self.alphas = torch.tensor([g.alphas for g in self.groups], dtype=torch.float32)
        self.weights = torch.tensor([g.weights for g in self.groups], dtype=torch.float32)
        self.classes = torch.tensor([g.classes for g in self.groups], dtype=torch.int64)
        self.mixtures = torch.tensor([g.mixtures for g in self.groups], dtype=torch.float32)
        self.numbers = torch.tensor([g.group for g in self.groups], dtype=torch.int64)
        self.series_digest = fingerprint([self.digest, self.numbers.tolist()])
        self.shard_sizes: list[int] = np.unique(loaded.shards, return_counts=True)[1].tolist()

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def labels(self) -> Tensor:
        """Dense soft labels, float32 [G, A, K]; each call allocates them, so prefer `soft_labels`
        for single images where there are many classes.
        """
        groups, positions = torch.meshgrid(
            torch.arange(len(self)), torch.arange(self.alphas.shape[1]), indexing="ij"
        )
        return self.soft_labels.dense(groups, positions)

    def __len__(self) -> int:
        """The number of groups."""
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
        """The same data with one sample per image, for a DataLoader."""
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
            rng: the only source of randomness; with
                `semix.data.fingerprint.generator_for(seed, step)` the draw depends on the step.
            count: images n of each group.
        Returns:
            images uint8 [B, n, H, W, 3] and soft labels float32 [B, n, K].
        """
        group, position = self.choose(targets, rng=rng, class_matched=class_matched, count=count)
        return self.read(group, position)

    def read(self, group: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Images and soft labels at these indices, which broadcast together.

        Returns:
            uint8 [..., H, W, 3] and float32 [..., K].
        """
        labels = self.soft_labels.dense(group, position)  # raises for indices out of range
        return images_at(self.images, group, position), labels

    def choose(
        self,
        targets: Tensor,
        *,
        rng: torch.Generator,
        class_matched: bool = True,
        count: int = 2,
    ) -> tuple[Tensor, Tensor]:
        """Choose what `draw` reads, without reading an image.

        As in CSM's loader: a group that contains the class of the real image; of its images,
        ordered by the label of that class, the most certain one and a random one between the
        ends. Without `class_matched` any group, and a random one of its classes.

        Args:
            targets: classes of the real images, int64 [B].
            count: images n of each group, as `end_and_inner` takes them.
        Returns:
            group int64 [B, 1] and position int64 [B, n].
        """
        if class_matched:
            group, target = self._groups_for(targets, rng), targets
        else:
            group = torch.randint(len(self), targets.shape, generator=rng)
            side = torch.randint(self.classes.shape[1], group.shape, generator=rng)
            target = self.classes[group, side]
        return group[:, None], end_and_inner(self.soft_labels, group, target, rng=rng, count=count)

    def check_groups_exist(self, targets: Tensor) -> None:
        """Raises InputError if there is no group to draw for one of these classes, int64 [B]."""
        missing = self._of_class.missing(targets)
        if missing is None:
            return
        problem = f"has no group of class {self.class_names[missing]!r}"
        if self.exclude is not None and (rules := self.exclude.rules()):
            rules_text = ", ".join(f"{name} {value}" for name, value in rules.items())
            raise InputError("exclude", rules_text, f"{self.url} then {problem}; ease a rule")
        remedy = f"{problem}; make some, or set mixed.class_matched to false"
        raise InputError("url", self.url, remedy)

    def _groups_for(self, targets: Tensor, rng: torch.Generator) -> Tensor:
        self.check_groups_exist(targets)
        return self._of_class.draw(targets, rng)


class MixedImages(Dataset[Sample]):
    """The N = G A images of a MixedDataset; image n is the one at n % A of group n // A."""

    def __init__(self, mixed: MixedDataset) -> None:
        # Only what samples need, because spawned workers get a copy of it.
        self.images, self.soft_labels, self.numbers = mixed.images, mixed.soft_labels, mixed.numbers
        self.alphas, self.weights = mixed.alphas, mixed.weights

    def __len__(self) -> int:
        return self.alphas.numel()

    def __getitem__(self, image: int | Sequence[int]) -> Sample:
        """image uint8 [H, W, 3], label float32 [K], group number, position, alpha and weight.

        A sequence of images gives a whole batch, for a DataLoader whose sampler gives batches and
        whose `batch_size` is None: three times as quick as collating samples.
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
        # Python numbers are collated much faster than tensors of one number.
        columns = (v.tolist() if v.ndim == 1 else v.unbind() for v in batch.values())
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class _Groups:
    """All groups that are read, in the order of the index.

    Attributes:
        records: one per group, without the labels, which are in `labels`.
        shards: int64 [G], position in the index; places: int64 [G, A, 2], offset and size.
    """

    records: list[SeriesRecord]
    shards: np.ndarray
    places: np.ndarray
    labels: SoftLabels


def _read_groups(
    source: PinnedRoot, files: ShardFiles, exclude: Exclusion, *, threads: int
) -> _Groups:
    """Everything but the images of the series in an index that the exclusion keeps."""
    chosen = SeriesFilter(exclude, source)
    records: list[SeriesRecord] = []
    shards: list[np.ndarray] = []
    places: list[np.ndarray] = []
    labels: list[tuple[np.ndarray, np.ndarray]] = []
    every = range(len(source.shards))
    with closing(mapped(files.contents, every, threads=threads)) as read:
        for at, contents, set_labels in zip(every, read, source.labels(source.shards), strict=True):
            shard, series = source.shards[at], contents.records
            try:
                if set_labels is not None:
                    series = [source.relabelled(record, set_labels) for record in series]
                probabilities, classes = sparse_arrays([record.labels for record in series])
                _check_series([*records[:1], *series], contents, classes, source=source)
            except ValueError as error:
                raise ValueError(f"{shard.tar}: {error}; run `semix verify`") from None
            keep = np.flatnonzero(chosen.keep(shard, series))
            records += [series[row].model_copy(update={"labels": []}) for row in keep]
            shards.append(np.full(len(keep), at))
            places.append(contents.places[keep])
            labels.append((probabilities[keep], classes[keep]))
    chosen.conclude()
    soft_labels = joined(labels, num_classes=len(source.class_names))
    return _Groups(records, np.concatenate(shards), np.concatenate(places), soft_labels)


def _check_series(
    records: Sequence[SeriesRecord],
    contents: ShardContents,
    classes: np.ndarray,
    *,
    source: PinnedRoot,
) -> None:
    """Raises ValueError unless the series agree with the plan and with each other."""
    images, names = source.root.plan.images_per_group, len(source.class_names)
    if contents.places.shape[1] != images:
        raise ValueError(f"{contents.places.shape[1]} images per group, the plan has {images}")
    largest = max(int(classes.max()), *(max(record.classes) for record in records))
    if largest >= names:
        raise ValueError(f"a label names class {largest}, the plan has {names}")
    kinds = {len(record.classes) for record in records}
    if len(kinds) > 1:
        raise ValueError(f"series of {min(kinds)} and of {max(kinds)} classes")


class ClassIndex:
    """Which groups contain each class, as one list with a segment per class.

    Args:
        classes: the distinct classes of each group, int64 [G, k].
    """

    def __init__(self, classes: Tensor, num_classes: int) -> None:
        of_entry = classes.flatten()
        # Stable, so that groups ascend within a class.
        self.groups = of_entry.argsort(stable=True) // classes.shape[1]
        self.counts = torch.bincount(of_entry, minlength=num_classes)
        self.starts = self.counts.cumsum(0) - self.counts

    def missing(self, targets: Tensor) -> int | None:
        """A class among the targets, int64 [B], that no group contains; None if there is none."""
        present = self.counts[targets] > 0
        return None if bool(present.all()) else int(targets[~present][0])

    def draw(self, targets: Tensor, rng: torch.Generator) -> Tensor:
        """For each target a random group that contains it, all with equal probability.

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
    """The image of each group that is most certainly of a class, and random inner ones.

    The images are ordered by the label of that class; inner ones lie between the two ends.

    Args:
        groups, targets: int64 [B].
        count: images per group: the end and `count - 1` inner ones, which are distinct if the
            series has as many. A single image is the end or an inner one, with equal probability.
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
    """Random positions of each row; none repeats before all of its row are used."""
    rows, length = positions.shape
    if count == 1:
        return positions.gather(1, torch.randint(length, (rows, 1), generator=rng))
    shuffled = torch.rand(rows, length, generator=rng).argsort(dim=1)
    return positions.gather(1, shuffled[:, torch.arange(count) % length])
