"""MixedDataset: the committed series of one pinned index, for a DataLoader and for CSM's draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.fingerprint import fingerprint
from semix.data.formats import SeriesLabels, SeriesRecord
from semix.data.labels import SoftLabels, by_ratio, sharpened
from semix.data.loaded_series import LoadedSeries, load_series
from semix.data.machine import cores
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.shard_files import CACHE_LIMIT, ShardCache, ShardFiles
from semix.data.stored_images import StoredImages, images_at, open_images

MEMORY_LIMIT = 8 * 2**30  # bytes of decoded images
MAX_THREADS = 16

Sample = dict[str, Any]


class MixedDataset(Dataset[Sample]):
    """All series of one pinned index: G series of A images, K classes.

    The index decides what is read, also when more shards are committed meanwhile. Images are
    decoded once into memory if they fit, else read from the shards on access: directly from a
    local root, through copies in a cache folder from a remote root.

    A sample for torch's DataLoader is a series; `by_image()` has one sample per image. `draw`
    returns the mixed images that CSM draws for each real image.

    Attributes:
        images: uint8 [G, A, H, W, 3]: a tensor if `in_memory`, else `StoredImages`, which is
            indexed by `[series, position]`.
        alphas, weights: float32 [G, A], weights of the first class in the conditioning and by
            CLIP; classes: int64 [G, k], the classes of each series, two except in a simplex;
            mixtures: float32 [G, A, k], the conditioning weights of these classes.
        soft_labels: the labels, sparse.
        numbers: int64 [G], the group numbers, which stay the same while a root grows.
        noise: how the noise of each series was selected.
        shard_sizes: number of series that are read from each shard, in the order of the index.
        digest: of the index; series_digest: of the index and the series that the exclusion keeps;
            label_digest: of the label set in use, or None.
        flags: number of files of flags that were read for the exclusion; None if it needs none.

    Args:
        index: name of the index to pin; the newest one by default.
        scale: sharpen the raw weights with it; None takes the labels as stored.
        rule: "mixing_ratio" takes the conditioning weights as labels, instead of stored ones.
        labels: digest of a label set, or its beginning; None takes the labels in the shards.
        exclude: rules for series to leave out.
        flags: number of files `flags/N.json` to read for them, as a run pinned it; None reads all.
        side: scale images to this many pixels when they are decoded; None leaves them as stored.
        memory_limit: bytes of decoded images that may be kept in memory.
        cache: where copies of remote shards are kept; `cache_folder()/shards` by default.
        cache_limit: bytes of such copies.
        threads: threads that decode, except small images; by default one per core, at most 16.
    Raises:
        InputError: no index yet, an index or label set that does not exist or lacks a shard,
            rules that leave no series, a scale or label set with "mixing_ratio", a scale for labels
            of more than two classes, or a side for images that are not square.
        ValueError: a shard is not what its index says; the message names it.
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
        flags: int | None = None,
        side: int | None = None,
        memory_limit: int = MEMORY_LIMIT,
        cache: Path | None = None,
        cache_limit: int = CACHE_LIMIT,
        threads: int | None = None,
    ) -> None:
        if rule != "stored" and (scale is not None or labels is not None):
            raise InputError("rule", rule, "takes no stored labels; leave scale and labels out")
        source = PinnedRoot(Root(url), index=index, labels=labels, scale=scale, flags=flags)
        self.url, self.class_names = source.root.url, source.class_names
        self.index_name, self.digest = source.index, source.digest
        self.label_digest = source.label_set.digest if source.label_set else None
        self.exclude = exclude
        self.flags = source.excluded.count if exclude and exclude.reads_flags else None
        shard_cache = None if source.store.local else ShardCache(cache, limit=cache_limit)
        files = ShardFiles(source.store, source.shards, cache=shard_cache)
        threads = threads or min(cores(), MAX_THREADS)
        loaded = load_series(source, files, exclude or Exclusion(), threads=threads)
        self._files, self._shards = files, loaded.shards
        self._set_attributes(loaded)
        self.soft_labels = loaded.labels
        if scale is not None:
            self.soft_labels = sharpened(
                self.weights, self.classes, scale, num_classes=self.num_classes
            )
        if rule == "mixing_ratio":
            self.soft_labels = by_ratio(self.mixtures, self.classes, num_classes=self.num_classes)
        self._drawn = torch.arange(len(self))
        self._class_index = ClassIndex(self.classes, self.num_classes)
        numbers = self.numbers.numpy()
        stored_images = open_images(
            files, loaded.shards, loaded.spans, numbers=numbers, side=side, threads=threads
        )
        self.in_memory = stored_images.nbytes <= memory_limit
        self.images: Tensor | StoredImages = (
            stored_images.in_memory() if self.in_memory else stored_images
        )

    def _set_attributes(self, loaded: LoadedSeries) -> None:
        arrays = loaded.arrays
        self.alphas, self.weights = (
            torch.from_numpy(arrays.alphas),
            torch.from_numpy(arrays.weights),
        )
        self.classes = torch.from_numpy(arrays.classes)
        self.mixtures = torch.from_numpy(arrays.mixtures)
        self.numbers = torch.from_numpy(arrays.numbers)
        self.noise = arrays.noise
        self.series_digest = fingerprint([self.digest, self.numbers.tolist()])
        self.shard_sizes: list[int] = np.unique(loaded.shards, return_counts=True)[1].tolist()

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def labels(self) -> Tensor:
        """Dense soft labels, float32 [G, A, K], newly allocated at each access.

        With many classes, `soft_labels` takes less memory.
        """
        groups, positions = torch.meshgrid(
            torch.arange(len(self)), torch.arange(self.alphas.shape[1]), indexing="ij"
        )
        return self.soft_labels.dense(groups, positions)

    def __len__(self) -> int:
        """The number of series."""
        return len(self.numbers)

    def __getitem__(self, group: int) -> Sample:
        """images uint8 [A, H, W, 3], labels float32 [A, K], alphas, weights [A], group number."""
        return self.__getitems__([group])[0]

    def __getitems__(self, groups: Sequence[int]) -> list[Sample]:
        """The samples of a batch, read at once; DataLoader calls this method."""
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

    def records(self, series: Sequence[int]) -> list[SeriesRecord]:
        """The records of these series, read from their shards, with the labels of the label set.

        Raises:
            InputError, ValueError: as of the constructor.
        """
        shards = sorted({int(self._shards[index]) for index in series})
        records = [record for shard in shards for record in self._files.contents(shard).records]
        by_group = {record.group: record for record in records}
        chosen = [by_group[int(self.numbers[index])] for index in series]
        if self.label_digest is None:
            return chosen
        source = PinnedRoot(Root(self.url), index=self.index_name, labels=self.label_digest)
        labels: dict[int, SeriesLabels] = {}
        for shard_labels in source.labels([source.shards[shard] for shard in shards]):
            labels |= shard_labels or {}
        return [source.relabelled(record, labels) for record in chosen]

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
        """Draw an end point and interior images of one random series for each real image.

        Args:
            targets: classes of the real images, int64 [B].
            rng: the only source of randomness; with
                `semix.data.fingerprint.generator_for(seed, step)` the draw depends on the step.
            count: images n of each series.
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
        """Choose the images that `draw` reads, without reading them.

        As in CSM's loader: a random series that contains the class of the real image; of its
        images, ordered by the label of that class, the most certain image and a random one
        between the ends. Without `class_matched`: any series, and a random one of its classes.

        Args:
            targets: classes of the real images, int64 [B].
            count: images n of each series, as in `end_and_inner`.
        Returns:
            group int64 [B, 1] and position int64 [B, n].
        """
        if class_matched:
            group, target = self._draw_groups(targets, rng), targets
        else:
            group = self._drawn[torch.randint(len(self._drawn), targets.shape, generator=rng)]
            side = torch.randint(self.classes.shape[1], group.shape, generator=rng)
            target = self.classes[group, side]
        return group[:, None], end_and_inner(self.soft_labels, group, target, rng=rng, count=count)

    def draw_only(self, series: Tensor) -> None:
        """Draw from these series alone, int64 [n], ascending; all can still be read."""
        self._drawn = series
        self._class_index = ClassIndex(self.classes[series], self.num_classes)
        self._class_index.groups = series[self._class_index.groups]
        self.series_digest = fingerprint([self.digest, self.numbers[series].tolist()])

    def check_groups_exist(self, targets: Tensor) -> None:
        """Raises InputError if there is no series to draw for one of these classes, int64 [B]."""
        missing = self._class_index.missing(targets)
        if missing is None:
            return
        problem = f"has no group of class {self.class_names[missing]!r}"
        if self.exclude is not None and (rules := self.exclude.rules()):
            rules_text = ", ".join(f"{name} {value}" for name, value in rules.items())
            raise InputError("exclude", rules_text, f"{self.url} then {problem}; ease a rule")
        remedy = f"{problem}; make some, or set mixed.class_matched to false"
        raise InputError("url", self.url, remedy)

    def _draw_groups(self, targets: Tensor, rng: torch.Generator) -> Tensor:
        self.check_groups_exist(targets)
        return self._class_index.draw(targets, rng)


class MixedImages(Dataset[Sample]):
    """The N = G A images of a MixedDataset; image n is at position n % A of series n // A."""

    def __init__(self, mixed: MixedDataset) -> None:
        # Only the attributes that samples need, because spawned workers get a copy of them.
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
        """The samples of a batch, read at once; DataLoader calls this method."""
        batch = self[images]
        columns = map(_column, batch.values())
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]


def _column(values: Tensor) -> Sequence[Any]:
    """One value per sample, of a type that is collated quickly and comes back as this dtype."""
    if values.ndim > 1:
        return values.unbind()
    return list(values.numpy()) if values.is_floating_point() else values.tolist()


class ClassIndex:
    """Which series contain each class, as one list with a segment per class.

    Args:
        classes: the distinct classes of each series, int64 [G, k].
    """

    def __init__(self, classes: Tensor, num_classes: int) -> None:
        entry_classes = classes.flatten()
        # Stable, so that series ascend within a class.
        self.groups = entry_classes.argsort(stable=True) // classes.shape[1]
        self.counts = torch.bincount(entry_classes, minlength=num_classes)
        self.starts = self.counts.cumsum(0) - self.counts

    def missing(self, targets: Tensor) -> int | None:
        """A class among the targets, int64 [B], that no series contains; None if there is none."""
        present = self.counts[targets] > 0
        return None if bool(present.all()) else int(targets[~present][0])

    def draw(self, targets: Tensor, rng: torch.Generator) -> Tensor:
        """Draw, for each target, one of the series that contain it, with equal probabilities.

        Args:
            targets: classes that are not missing, int64 [B].
        Returns:
            indices of series, int64 [B].
        """
        fraction = torch.rand(len(targets), generator=rng, dtype=torch.float64)
        offset = (fraction * self.counts[targets]).long()
        return self.groups[self.starts[targets] + offset]


def end_and_inner(
    labels: SoftLabels, groups: Tensor, targets: Tensor, *, rng: torch.Generator, count: int = 2
) -> Tensor:
    """Positions of the image that is most certainly of a class, and of random inner images.

    The images of each series are ordered by the label of that class; inner images lie between the
    first and the last.

    Args:
        groups, targets: indices of series and classes, int64 [B].
        count: images per series: the end and `count - 1` inner images, which are distinct if the
            series has as many. A single image is the end or an inner one, with equal probability.
    Returns:
        positions, int64 [B, count].
    """
    order = labels.of_class(groups, targets).argsort(dim=1, descending=True)  # [B, A]
    # A series of two images has no interior; its other end is used instead.
    end, inner = order[:, :1], order[:, 1:-1] if order.shape[1] > 2 else order[:, 1:]
    positions = torch.cat([end, _random_positions(inner, max(count - 1, 1), rng)], dim=1)
    if count > 1:
        return positions
    return positions.gather(1, torch.randint(2, (len(groups), 1), generator=rng))


def _random_positions(positions: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """`count` random positions from each row; none repeats before all of the row are used."""
    rows, length = positions.shape
    if count == 1:
        return positions.gather(1, torch.randint(length, (rows, 1), generator=rng))
    shuffled = torch.rand(rows, length, generator=rng).argsort(dim=1)
    return positions.gather(1, shuffled[:, torch.arange(count) % length])
