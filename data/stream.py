"""A pinned index as a webdataset pipeline, for training code that reads its data as a stream."""

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import webdataset as wds
from torch import Tensor
from webdataset.compat import FluidInterface
from webdataset.utils import pytorch_worker_info

from semix.data.exclusion import Exclusion
from semix.data.fingerprint import derived_seed
from semix.data.formats import SeriesRecord, ShardEntry
from semix.data.images import decode_series
from semix.data.labels import dense_labels
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.series_filter import SeriesFilter
from semix.data.tar import group_key

Sample = dict[str, Any]


class MixedPipeline(wds.DataPipeline, FluidInterface):
    """The result of `mixed_pipeline`: a pipeline of webdataset with reproducible epochs."""

    def __init__(self, passes: "_Passes", *stages: Any) -> None:
        super().__init__(*stages)
        self._passes = passes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next order is shuffled by, as in torch's DistributedSampler.

        It also reaches persistent workers of a DataLoader, and pipelines composed from this one.
        """
        self._passes.epoch.fill_(epoch)

    def iterator(self) -> Iterator[Any]:
        self._passes.number = -1  # `_shards` begins the first pass
        yield from super().iterator()


def mixed_pipeline(
    url: str,
    *,
    index: str | None = None,
    labels: str | None = None,
    scale: float | None = None,
    exclude: Exclusion | None = None,
    flags: int | None = None,
    series: bool = False,
    dense: bool = True,
    shuffle: int = 1000,
    seed: int = 0,
    epoch: int = 0,
) -> MixedPipeline:
    """The images of a mixed dataset as a webdataset pipeline.

    Shards are shuffled by seed and epoch, with the same result everywhere, divided among ranks
    and then among a DataLoader's workers by webdataset's own `split_by_node` and
    `split_by_worker`, and read from any store sequentially, by the strict reader of tars. With
    any number of ranks and workers, every image comes exactly once per epoch. The number of
    images per rank differs, because shards differ, and surplus workers get no shard:
    equalise them with `with_epoch(images // ranks // workers)`, or use `MixedDataset` with
    torch's samplers. The same seed, epoch, ranks and workers give the same order; later passes of
    `with_epoch` and `repeat` have other orders.

    Call `set_epoch` before each epoch. accelerate leaves a `webdataset.WebLoader` as it is. Do not
    let it prepare a plain DataLoader: it would divide the images of each rank again, and lose some.

    A sample has `__key__`, `__url__` (of its tar), `image` uint8 [H, W, 3], `label`, `group`,
    `position`, `alpha` and `weight`; with `series` instead `images` [A, H, W, 3], `labels`,
    `group`, `alphas` and `weights` float32 [A]. Images are decoded.

    Args:
        index, labels, scale, exclude, flags: as in `MixedDataset`.
        series: a sample is a series, not an image.
        dense: labels are float32 [K], or [A, K] of a series; else sparse: lists of (class,
            probability), of different lengths.
        shuffle: size of the buffer that shuffles encoded samples; 0 shuffles only the shards.
    Raises:
        InputError: as in `MixedDataset`.
        ValueError: while reading, a shard or an image is damaged; the message names it.
    """
    source = PinnedRoot(Root(url), index=index, labels=labels, scale=scale, flags=flags)
    series_filter = None if exclude is None else SeriesFilter(exclude, source)
    passes = _Passes(seed, torch.tensor(epoch).share_memory_())
    pipeline = MixedPipeline(
        passes,
        partial(_shards, source, passes),
        wds.split_by_node,
        wds.split_by_worker,
        partial(_encoded, source=source, series_filter=series_filter, series=series),
    )
    if shuffle:
        pipeline.append(partial(_shuffled, passes=passes, size=shuffle))
    pipeline.append(partial(_decoded, source=source, series=series, dense=dense))
    return pipeline


class _Passes:
    """The number of the current pass over the shards, and its random numbers.

    Attributes:
        epoch: int64 [], in memory that forked and spawned workers share.
        number: number of passes before this one since the iteration began.
    """

    def __init__(self, seed: int, epoch: Tensor) -> None:
        self.seed, self.epoch, self.number = seed, epoch, 0

    def rng(self, *parts: int | str) -> random.Random:
        return random.Random(derived_seed(self.seed, int(self.epoch), self.number, *parts))


class _Encoded(NamedTuple):
    """An image or a whole series, still encoded."""

    tar: str
    record: SeriesRecord
    positions: Sequence[int]
    contents: Sequence[bytes]


def _shards(source: PinnedRoot, passes: _Passes) -> Iterator[ShardEntry]:
    """All shards in the order of the pass, which is the same on every rank and worker."""
    passes.number += 1
    shards = list(source.shards)
    passes.rng("shards").shuffle(shards)
    return iter(shards)


def _encoded(
    shards: Iterable[ShardEntry],
    *,
    source: PinnedRoot,
    series_filter: SeriesFilter | None,
    series: bool,
) -> Iterator[_Encoded]:
    num_read = 0
    for shard in shards:
        num_read += 1
        for sample in source.samples(shard):
            if series_filter is not None and not series_filter.keep(shard, [sample.record])[0]:
                continue
            count = len(sample.images)
            for positions in [range(count)] if series else [[index] for index in range(count)]:
                contents = [sample.images[position] for position in positions]
                yield _Encoded(shard.tar, sample.record, positions, contents)
    if series_filter is not None:
        series_filter.conclude(whole=num_read == len(source.shards))


def _shuffled(samples: Iterator[_Encoded], *, passes: _Passes, size: int) -> Iterator[_Encoded]:
    rank, _, worker, _ = pytorch_worker_info()
    rng = passes.rng("buffer", rank, worker)
    shuffled: Iterator[_Encoded] = wds.shuffle(size, rng=rng)(samples)
    return shuffled


def _decoded(
    samples: Iterator[_Encoded], *, source: PinnedRoot, series: bool, dense: bool
) -> Iterator[Sample]:
    num_classes = len(source.class_names) if dense else None
    for sample in samples:
        identity = {"__url__": f"{source.root.url}/{sample.tar}", "group": sample.record.group}
        yield identity | (_series if series else _image)(sample, num_classes)


def _image(sample: _Encoded, num_classes: int | None) -> Sample:
    record, (position,) = sample.record, sample.positions
    (image,), label = _pixels(sample), record.labels[position]
    return {
        "__key__": f"{group_key(record.group)}-{position:02d}",
        "image": image,
        "label": label if num_classes is None else dense_labels([label], num_classes)[0],
        "position": position,
        "alpha": record.alphas[position],
        "weight": record.weights[position],
    }


def _series(sample: _Encoded, num_classes: int | None) -> Sample:
    record = sample.record
    labels = record.labels
    return {
        "__key__": group_key(record.group),
        "images": _pixels(sample),
        "labels": labels if num_classes is None else dense_labels(labels, num_classes),
        "alphas": np.array(record.alphas, dtype=np.float32),
        "weights": np.array(record.weights, dtype=np.float32),
    }


def _pixels(sample: _Encoded) -> np.ndarray:
    """uint8 [n, H, W, 3]."""
    group, positions = sample.record.group, sample.positions
    try:
        return decode_series(sample.contents, group=group, positions=positions)
    except ValueError as error:
        raise ValueError(f"{sample.tar}: {error}; run `semix verify --full`") from None
