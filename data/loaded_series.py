"""All series of a pinned index that an exclusion keeps, as arrays, without their images."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from semix.data.exclusion import Exclusion
from semix.data.formats import SeriesRecord
from semix.data.labels import SoftLabels, joined, sparse_arrays
from semix.data.pinned import PinnedRoot
from semix.data.series_filter import SeriesFilter
from semix.data.shard_files import ShardContents, ShardFiles
from semix.data.threads import mapped


@dataclass(frozen=True)
class NoiseScores:
    """How the noise of G series was selected.

    Attributes:
        strategies: names of those that occur; strategy: int8 [G], the number of each.
        stability: float64 [G], of the noise in use; NaN where it was not scored.
        candidates: float64 [G, C], the scores of the candidates; NaN where there are fewer, or
            where one has no score.
    """

    strategies: tuple[str, ...]
    strategy: np.ndarray
    stability: np.ndarray
    candidates: np.ndarray


class SeriesArrays(NamedTuple):
    """What is kept of the records of G series; shapes and types as of `MixedDataset`."""

    numbers: np.ndarray
    classes: np.ndarray
    alphas: np.ndarray
    weights: np.ndarray
    mixtures: np.ndarray
    noise: NoiseScores


@dataclass(frozen=True)
class LoadedSeries:
    """All series that are read, in the order of the index.

    Attributes:
        shards: int64 [G], index of the shard in the pinned index; spans: int64 [G, A, 2], offset
            and size of each image in its tar.
    """

    arrays: SeriesArrays
    shards: np.ndarray
    spans: np.ndarray
    labels: SoftLabels


def load_series(
    source: PinnedRoot, files: ShardFiles, exclude: Exclusion, *, threads: int
) -> LoadedSeries:
    """Read all series of an index that the exclusion keeps, without their images."""
    series_filter = SeriesFilter(exclude, source)
    arrays: list[SeriesArrays] = []
    first: list[SeriesRecord] = []  # of the index, which the others must be like
    strategies: dict[str, int] = {}
    shards: list[np.ndarray] = []
    spans: list[np.ndarray] = []
    labels: list[tuple[np.ndarray, np.ndarray]] = []
    indices = range(len(source.shards))
    with closing(mapped(files.contents, indices, threads=threads)) as all_contents:
        all_labels = source.labels(source.shards)
        for index, contents, set_labels in zip(indices, all_contents, all_labels, strict=True):
            shard, series = source.shards[index], contents.records
            try:
                if set_labels is not None:
                    series = [source.relabelled(record, set_labels) for record in series]
                probabilities, classes = sparse_arrays([record.labels for record in series])
                _check_series([*first, *series], contents, classes, source=source)
            except ValueError as error:
                raise ValueError(f"{shard.tar}: {error}; run `semix verify`") from None
            first = first or series[:1]
            rows = np.flatnonzero(series_filter.keep(shard, series))
            if not len(rows):
                continue
            arrays.append(_arrays([series[row] for row in rows], strategies))
            shards.append(np.full(len(rows), index))
            spans.append(contents.spans[rows])
            labels.append((probabilities[rows], classes[rows]))
    series_filter.conclude()
    soft_labels = joined(labels, num_classes=len(source.class_names))
    return LoadedSeries(
        _joined(arrays, tuple(strategies)),
        np.concatenate(shards),
        np.concatenate(spans),
        soft_labels,
    )


def _arrays(records: Sequence[SeriesRecord], strategies: dict[str, int]) -> SeriesArrays:
    """The values of some series; new strategies of noise get the next number."""
    names = [str(record.noise.get("strategy", "unknown")) for record in records]
    codes = [strategies.setdefault(name, len(strategies)) for name in names]
    scores = [record.noise.get("scores") or [] for record in records]
    candidates = np.full((len(records), max(map(len, scores))), np.nan)
    for row, values in enumerate(scores):
        candidates[row, : len(values)] = [np.nan if v is None else v for v in values]
    stability = [np.nan if r.stability is None else r.stability for r in records]
    return SeriesArrays(
        np.array([record.group for record in records], dtype=np.int64),
        np.array([record.classes for record in records], dtype=np.int64),
        np.array([record.alphas for record in records], dtype=np.float32),
        np.array([record.weights for record in records], dtype=np.float32),
        np.array([record.mixtures for record in records], dtype=np.float32),
        NoiseScores((), np.array(codes, dtype=np.int8), np.array(stability), candidates),
    )


def _joined(arrays: Sequence[SeriesArrays], strategies: tuple[str, ...]) -> SeriesArrays:
    *columns, noises = zip(*arrays, strict=True)
    width = max(noise.candidates.shape[1] for noise in noises)
    padded = [
        np.pad(n.candidates, ((0, 0), (0, width - n.candidates.shape[1])), constant_values=np.nan)
        for n in noises
    ]
    noise = NoiseScores(
        strategies,
        np.concatenate([n.strategy for n in noises]),
        np.concatenate([n.stability for n in noises]),
        np.concatenate(padded),
    )
    numbers, classes, alphas, weights, mixtures = map(np.concatenate, columns)
    return SeriesArrays(numbers, classes, alphas, weights, mixtures, noise)


def _check_series(
    records: Sequence[SeriesRecord],
    contents: ShardContents,
    classes: np.ndarray,
    *,
    source: PinnedRoot,
) -> None:
    """Raises ValueError unless the series agree with the plan and with each other."""
    images, names = source.root.plan.images_per_group, len(source.class_names)
    if contents.spans.shape[1] != images:
        raise ValueError(f"{contents.spans.shape[1]} images per group, the plan has {images}")
    largest = max(int(classes.max()), *(max(record.classes) for record in records))
    if largest >= names:
        raise ValueError(f"a label names class {largest}, the plan has {names}")
    kinds = {len(record.classes) for record in records}
    if len(kinds) > 1:
        raise ValueError(f"series of {min(kinds)} and of {max(kinds)} classes")
