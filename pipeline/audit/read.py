"""Read the shards of an index once, decoding on threads; keep facts on series, but no images."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from semix.data.errors import InputError
from semix.data.formats import SeriesRecord, ShardEntry
from semix.data.labels import dense_labels
from semix.data.machine import cores
from semix.data.pinned import PinnedRoot
from semix.data.quality import read_end_points
from semix.data.tar import GroupSample
from semix.data.threads import mapped
from semix.pipeline.audit.concepts import Concepts
from semix.pipeline.audit.pictures import FAULTS, Pictures, measure_pictures

NOT_FINITE = 1 << FAULTS.index("not finite")


class SeriesFacts(NamedTuple):
    """One series of A images between k classes; for G series, G is the first dimension.

    Attributes:
        group, shard: int64 [].
        classes: int64 [k].
        alphas, weights: float32 [A], of the first class.
        mixture, coordinates: float32 [A, k], conditioning and CLIP weights of every class.
        label: float32 [A], probability of the first class.
        entropy: float32 [A], of the label, nats.
        others: float32 [A], probability of classes that the series does not mix.
        intended, nearest, of_series: int64 [A], see `semix.data.quality.EndPoints`.
        judged: int64 [A], the class that the judge gives to an unmixed image; -1 elsewhere.
        pictures: checks on pixels; its `faults` also mark features that are not finite.
        disagreement: float32 [A], of the second encoder's weights; NaN without one.
        stability: float32 [], of the noise; NaN if it was not scored.
        concepts: float32 [A, C], see `semix.pipeline.audit.concepts`; C is 0 without concepts.
    """

    group: np.ndarray
    shard: np.ndarray
    classes: np.ndarray
    alphas: np.ndarray
    weights: np.ndarray
    mixture: np.ndarray
    coordinates: np.ndarray
    label: np.ndarray
    entropy: np.ndarray
    others: np.ndarray
    intended: np.ndarray
    nearest: np.ndarray
    of_series: np.ndarray
    judged: np.ndarray
    pictures: Pictures
    disagreement: np.ndarray
    stability: np.ndarray
    concepts: np.ndarray


class ExaminedSeries(NamedTuple):
    """The facts on one series, with values that are dropped once they are summed or judged.

    Attributes:
        mass: float64 [K], the sum of labels over its images.
        unmixed: uint8 [M, H, W, 3], its unmixed images (end points), for a judge.
    """

    series: SeriesFacts
    mass: np.ndarray
    unmixed: np.ndarray


def examine(
    sample: GroupSample,
    features: Tensor,
    vectors: Tensor,
    *,
    shard: int,
    concepts: Concepts | None = None,
) -> ExaminedSeries:
    """Compute the facts on one series.

    Args:
        features: [A, D], as stored; vectors: [K, D], class prototypes.
    Raises:
        ValueError: an image cannot be decoded, or the images differ in size.
    """
    record = sample.record
    images = sample.pixels()
    alphas = np.array(record.alphas, dtype=np.float32)
    end_points = read_end_points(record.mixtures, record.classes, features, vectors)
    pictures = measure_pictures(images, alphas)
    labels = dense_labels(record.labels, len(vectors), dtype=np.float64)
    series = SeriesFacts(
        group=np.array(record.group),
        shard=np.array(shard),
        classes=np.array(record.classes),
        alphas=alphas,
        weights=np.array(record.weights, dtype=np.float32),
        mixture=np.array(record.mixtures, dtype=np.float32),
        coordinates=_coordinates(record),
        label=labels[:, record.classes[0]].astype(np.float32),
        entropy=_entropy(labels).astype(np.float32),
        others=np.delete(labels, record.classes, axis=1).sum(1).astype(np.float32),
        **{name: value.numpy() for name, value in end_points._asdict().items()},
        judged=np.full(len(alphas), -1),
        pictures=pictures._replace(faults=pictures.faults | _not_finite(features)),
        disagreement=_disagreement(record),
        stability=np.array(_or_nan(record.stability), dtype=np.float32),
        concepts=(
            np.zeros((len(alphas), 0), dtype=np.float32)
            if concepts is None
            else concepts.excess(features, record.classes)
        ),
    )
    return ExaminedSeries(series, labels.sum(0), images[series.intended >= 0])


def stacked(rows: Sequence[SeriesFacts]) -> SeriesFacts:
    """Stack the facts on single series.

    Raises:
        ValueError: they differ in their number of images or classes.
    """
    return _by_field(np.stack, rows)


def joined(stacks: Sequence[SeriesFacts]) -> SeriesFacts:
    """Concatenate stacks of series."""
    return _by_field(np.concatenate, stacks)


def _by_field(join: Callable[[Any], np.ndarray], rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], np.ndarray):
        return join(rows)
    return type(rows[0])(*(_by_field(join, column) for column in zip(*rows, strict=True)))


def _entropy(labels: np.ndarray) -> np.ndarray:
    logarithms = np.log(labels, where=labels > 0, out=np.zeros_like(labels))
    return -(labels * logarithms).sum(-1)


def _coordinates(record: SeriesRecord) -> np.ndarray:
    pairs = [[weight, 1 - weight] for weight in record.weights]
    return np.array(record.coordinates or pairs, dtype=np.float32)


def _not_finite(features: Tensor) -> np.ndarray:
    broken = ~torch.isfinite(features).all(-1)
    return broken.numpy().astype(np.uint8) * NOT_FINITE


def _disagreement(record: SeriesRecord) -> np.ndarray:
    if record.agreement is None:
        return np.full(len(record.alphas), np.nan, dtype=np.float32)
    return np.array(record.agreement.difference, dtype=np.float32)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


Judge = Callable[[np.ndarray], np.ndarray]  # uint8 [M, H, W, 3] to classes, int64 [M]
JUDGE_BATCH = 128  # unmixed images gathered for the judge; fewer at a shard's end


class Unreadable(ValueError):
    """No shard of an index can be read."""


@dataclass(frozen=True)
class AuditFacts:
    """The facts on all series of an index.

    Attributes:
        series: of all shards that could be read, in the order of the index.
        mass: float64 [K], the sum of all labels.
        unreadable: fault of each shard that cannot be read.
        size: height and width of the images.
    """

    series: SeriesFacts
    mass: np.ndarray
    unreadable: dict[int, str]
    size: tuple[int, int]


def read_facts(
    source: PinnedRoot,
    *,
    judge: Judge | None = None,
    concepts: Concepts | None = None,
    heartbeat: Callable[[int], None] = lambda groups: None,
) -> AuditFacts:
    """Examine every series of a pinned index.

    Args:
        heartbeat: called after each shard with its number of groups.
    Raises:
        Unreadable: no shard can be read; the message names the first fault.
    """
    stacks: list[SeriesFacts] = []
    mass, unreadable, size = np.zeros(len(source.prototypes)), {}, (0, 0)
    for shard in source.shards:
        try:
            stack, shard_mass, size = _read_shard(source, shard, judge, concepts)
        except InputError:  # from the judge or the label set; no shard is at fault
            raise
        except FileNotFoundError:
            unreadable[shard.shard] = f"{shard.tar}: is not there"
            continue
        except ValueError as error:
            unreadable[shard.shard] = _message_with_file(shard, error)
            continue
        stacks.append(stack)
        mass += shard_mass
        heartbeat(shard.groups)
    if not stacks:
        first = next(iter(unreadable.values()), "the index lists no shard")
        raise Unreadable(f"no shard of {source.index} can be read: {first}")
    return AuditFacts(joined(stacks), mass, unreadable, size)


def _read_shard(
    source: PinnedRoot, shard: ShardEntry, judge: Judge | None, concepts: Concepts | None
) -> tuple[SeriesFacts, np.ndarray, tuple[int, int]]:
    """Facts of a shard's series, their label mass, and the images' height and width."""
    facts, mass = [], np.zeros(len(source.prototypes))
    batcher = _JudgeBatcher(judge)

    def examine_sample(series: tuple[GroupSample, Tensor]) -> ExaminedSeries:
        return examine(*series, source.prototypes, shard=shard.shard, concepts=concepts)

    threads = cores()
    samples = _with_features(source, shard)
    with closing(mapped(examine_sample, samples, threads=threads, ahead=4 * threads)) as examined:
        for series in examined:
            facts.append(series.series)
            mass += series.mass
            batcher.add(series)
    batcher.flush()
    return stacked(facts), mass, series.unmixed.shape[1:3]


def _with_features(source: PinnedRoot, shard: ShardEntry) -> Iterator[tuple[GroupSample, Tensor]]:
    features = source.features(shard)
    for row, sample in enumerate(source.samples(shard)):
        if row < len(features):  # surplus series raise an error after the last one
            yield sample, features[row]


def _message_with_file(shard: ShardEntry, error: ValueError) -> str:
    """The message of an error with the name of its file, which errors in images lack."""
    has_file = str(error).startswith(("shards/", "labels/"))
    return str(error) if has_file else f"{shard.tar}: {error}"


class _JudgeBatcher:
    """Classifies unmixed images with a judge, in batches, and stores the classes in the facts."""

    def __init__(self, judge: Judge | None) -> None:
        self.judge = judge
        self.waiting: list[ExaminedSeries] = []

    def add(self, series: ExaminedSeries) -> None:
        self.waiting.append(series)
        if sum(len(series.unmixed) for series in self.waiting) >= JUDGE_BATCH:
            self.flush()

    def flush(self) -> None:
        waiting, self.waiting = self.waiting, []
        if self.judge is None or not any(len(series.unmixed) for series in waiting):
            return
        classes = iter(self.judge(np.concatenate([series.unmixed for series in waiting])).tolist())
        for series in waiting:
            images = np.flatnonzero(series.series.intended >= 0)
            series.series.judged[images] = [next(classes) for _ in images]
