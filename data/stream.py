"""A pinned index as a webdataset pipeline, for training code that reads its data as a stream."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import webdataset as wds
from torch import Tensor
from webdataset.compat import FluidInterface
from webdataset.filters import default_collation_fn
from webdataset.utils import pytorch_worker_info

from semix.data.errors import InputError
from semix.data.exclusion import Exclusion
from semix.data.formats import SeriesRecord, ShardEntry
from semix.data.images import decode_series
from semix.data.labels import dense_labels
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.series_filter import SeriesFilter
from semix.data.stream_order import Position, StreamIdentity, StreamOrder
from semix.data.tar import group_key

Sample = dict[str, Any]
T = TypeVar("T")


# webdataset's stages that hold samples back, or count them from the start of each iteration. Its
# `batched` takes the next sample before it gives a batch.
WITHOUT_STATE = {"_shuffle", "detshuffle", "_unbatched", "_unlisted", "islice"}
WITHOUT_STATE |= {"_batched", "Cached", "LMDBCached"}


class MixedPipeline(wds.DataPipeline, FluidInterface):
    """The result of `mixed_pipeline`: reproducible epochs, which go on in the middle."""

    def __init__(self, order: StreamOrder, *stages: Any) -> None:
        super().__init__(*stages)
        self._order, self._num_stages = order, len(stages)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next order is shuffled by, as in torch's DistributedSampler.

        It also reaches persistent workers of a DataLoader, and pipelines composed from this one.
        The epoch of a state that was loaded goes on in its middle, another one from its start.
        """
        self._order.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """How far this rank is, as a few numbers that JSON can hold.

        It is exact where the stream is iterated in this process, also by a DataLoader without
        workers. Workers read ahead: a torchdata `StatefulDataLoader` asks them and has a
        state_dict of its own, which is the one to save; with a plain DataLoader, pass the
        `cursor` of each batch to `consumed`.

        Raises:
            InputError: workers read the stream and `consumed` was not called, or a stage was
                added that holds samples back.
        """
        for stage in self.pipeline[self._num_stages :]:
            name = getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__)
            if name in WITHOUT_STATE:
                remedy = "no state counts the samples it holds; use the stream's own methods"
                raise InputError("state_dict", f"of a stream with {name.strip('_')}", remedy)
        return self._order.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a state ends, in the state's epoch.

        Load it before the DataLoader is iterated for the first time. Shards whose images were all
        given are not read again, unless `exclude` is set; no image is decoded again.

        Raises:
            InputError: not a state of a stream; or of another index, seed, shuffle, series,
                exclude, rank or number of ranks. Another number of workers is refused when the
                iteration begins.
        """
        self._order.load(state)

    def consumed(self, cursors: Tensor | np.ndarray) -> None:
        """Note a batch as used, for `state_dict` in a process whose workers read ahead.

        Args:
            cursors: the `cursor` of each sample, int64 [6] or [B, 6], as they were read, in the
                order of the loader.
        Raises:
            InputError: they are of another epoch than the stream.
        """
        self._order.consume(cursors)

    def batched(
        self,
        batchsize: int,
        collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
        partial: bool = True,
    ) -> "MixedPipeline":
        """As webdataset's `batched`, but reads no sample ahead."""
        return cast(MixedPipeline, self.compose(_Batches(batchsize, collation_fn, partial)))

    def listed(self, batchsize: int, partial: bool = True) -> "MixedPipeline":
        """As webdataset's `listed`, but reads no sample ahead."""
        return self.batched(batchsize, collation_fn=None, partial=partial)

    def __iter__(self) -> Iterator[Any]:
        start = self._order.begin()
        if self.repetitions != 1 and self.nsamples > 0:
            return islice(self._outputs(start), max(0, self.nsamples - start.outputs))
        return self._outputs(start)

    def iterator(self) -> Iterator[Any]:
        return self._outputs(self._order.begin())

    def _outputs(self, start: Position) -> Iterator[Any]:
        """All passes from a position on; ends if a whole pass gives nothing."""
        for number in range(start.passes, self.repetitions):
            skip = start.samples if number == start.passes else 0
            self._order.start_pass(number, skip)
            count = 0
            for output in self.iterator1():
                count += 1
                self._order.count_output()
                yield output
            if not count and not skip:
                return


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

    Call `set_epoch` before each epoch. `state_dict` and `load_state_dict` go on in the middle of
    one, with as many ranks and workers. accelerate leaves a `webdataset.WebLoader` as it is. Do not
    let it prepare a plain DataLoader: it would divide the images of each rank again, and lose some.

    A sample has `__key__`, `__url__` (of its tar), `image` uint8 [H, W, 3], `label`, `group`,
    `position`, `alpha` and `weight`; with `series` instead `images` [A, H, W, 3], `labels`,
    `group`, `alphas` and `weights` float32 [A]. Images are decoded. Both have `cursor`, int64
    [6]: how far the worker is with this sample, for `consumed`.

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
    identity = StreamIdentity(
        source.index,
        source.digest,
        seed,
        shuffle,
        series,
        "" if series_filter is None else series_filter.digest,
    )
    order = StreamOrder(identity, epoch)
    return MixedPipeline(
        order,
        partial(_shards, source, order),
        wds.split_by_node,
        wds.split_by_worker,
        partial(_encoded, source=source, order=order, series_filter=series_filter),
        partial(_shuffled, order=order),
        partial(_decoded, source=source, order=order, dense=dense),
    )


class _Encoded(NamedTuple):
    """An image or a whole series, still encoded."""

    tar: str
    record: SeriesRecord
    positions: Sequence[int]
    contents: Sequence[bytes]


class _Batches(NamedTuple):
    """The stage of `MixedPipeline.batched`."""

    size: int
    collate: Callable[[list[Any]], Any] | None
    partial: bool

    def __call__(self, samples: Iterable[Any]) -> Iterator[Any]:
        samples = iter(samples)
        while batch := list(islice(samples, self.size)):
            if len(batch) == self.size or self.partial:
                yield batch if self.collate is None else self.collate(batch)


def _shards(source: PinnedRoot, order: StreamOrder) -> Iterator[ShardEntry]:
    """All shards in the order of the pass, which is the same on every rank and worker."""
    shards = list(source.shards)
    order.rng("shards").shuffle(shards)
    return iter(shards)


def _encoded(
    shards: Iterable[ShardEntry],
    *,
    source: PinnedRoot,
    order: StreamOrder,
    series_filter: SeriesFilter | None,
) -> Iterator[_Encoded | None]:
    """The samples of these shards; None for each one of a shard that need not be read again."""
    shards = list(shards)
    per_series = 1 if order.identity.series else source.root.plan.images_per_group
    counts = [shard.groups * per_series for shard in shards]
    # Before the series are read, nobody knows how many of them the rules leave out.
    skip = series_filter is None and order.skip > 0
    is_given = _all_given(counts, order) if skip else [False] * len(shards)
    for shard, count, given in zip(shards, counts, is_given, strict=True):
        if given:
            yield from (None for _ in range(count))
        else:
            yield from _samples_of(shard, source, order.identity.series, series_filter)
    if series_filter is not None:
        series_filter.conclude(whole=len(shards) == len(source.shards))


def _all_given(counts: Sequence[int], order: StreamOrder) -> list[bool]:
    """Whether all samples of each shard are among those that the loaded state counts."""
    given = set(islice(_shuffled(iter(range(sum(counts))), order=order), order.skip))
    ends = np.cumsum(counts).tolist()
    spans = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [given.issuperset(span) for span in spans]


def _samples_of(
    shard: ShardEntry, source: PinnedRoot, series: bool, series_filter: SeriesFilter | None
) -> Iterator[_Encoded]:
    for sample in source.samples(shard):
        if series_filter is not None and not series_filter.keep(shard, [sample.record])[0]:
            continue
        count = len(sample.images)
        for positions in [range(count)] if series else [[index] for index in range(count)]:
            contents = [sample.images[position] for position in positions]
            yield _Encoded(shard.tar, sample.record, positions, contents)


def _shuffled(samples: Iterator[T], *, order: StreamOrder) -> Iterator[T]:
    """Shuffled in the buffer, by random numbers that do not depend on the samples."""
    if not order.identity.shuffle:
        return samples
    rank, _, worker, _ = pytorch_worker_info()
    rng = order.rng("buffer", rank, worker)
    shuffled: Iterator[T] = wds.shuffle(order.identity.shuffle, rng=rng)(samples)
    return shuffled


def _decoded(
    samples: Iterator[_Encoded | None], *, source: PinnedRoot, order: StreamOrder, dense: bool
) -> Iterator[Sample]:
    num_classes = len(source.class_names) if dense else None
    for sample in islice(samples, order.skip, None):
        assert sample is not None, "a sample that was not given before"
        identity = {"__url__": f"{source.root.url}/{sample.tar}", "group": sample.record.group}
        content = (_series if order.identity.series else _image)(sample, num_classes)
        yield identity | content | {"cursor": order.advance()}


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
