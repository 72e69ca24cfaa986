"""Facts of one series, small enough to keep for all: record, end points, pixels."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.end_points import mixture_of, read_end_points
from data.images import decode_image
from data.shards import GroupSample
from pipeline.audit.pictures import FAULTS, look_at

NOT_FINITE = 1 << FAULTS.index("not finite")


class Series(NamedTuple):
    """One series of A images between k classes; of G series, with G in front of each shape.

    Attributes:
        group, shard: int64 [].
        classes: int64 [k].
        alphas, weights: float32 [A], of the first class.
        mixture, coordinates: float32 [A, k], conditioning and CLIP weights of every class.
        label: float32 [A], probability of the first class.
        entropy: float32 [A], of the label, nats.
        intended, nearest, of_series: int64 [A], see `data.end_points.EndPoints`.
        judged: int64 [A], what the judge sees in an unmixed image; -1 elsewhere.
        faults, hashes, coarse, exact, steps: see `pictures.Pictures`; `faults` also has
            features that are no numbers.
        disagreement: float32 [A], of the second encoder's weights; NaN without one.
        stability: float32 [], of the noise; NaN where it was not scored.
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
    intended: np.ndarray
    nearest: np.ndarray
    of_series: np.ndarray
    judged: np.ndarray
    faults: np.ndarray
    hashes: np.ndarray
    coarse: np.ndarray
    exact: np.ndarray
    steps: np.ndarray
    disagreement: np.ndarray
    stability: np.ndarray


class Examined(NamedTuple):
    """One series with what is not kept.

    Attributes:
        mass: float64 [K], its labels, summed over images.
        ends: uint8 [M, H, W, 3], its unmixed images, for a judge.
    """

    series: Series
    mass: np.ndarray
    ends: np.ndarray


def examine(sample: GroupSample, features: Tensor, vectors: Tensor, *, shard: int) -> Examined:
    """Everything the audit keeps of one series.

    Args:
        features: [A, D], stored ones; vectors: [K, D], class prototypes.
    Raises:
        ValueError: an image cannot be decoded, or the images differ in size.
    """
    record = sample.record
    images = _decoded(sample)
    alphas = np.array(record["alphas"], dtype=np.float32)
    ends = read_end_points(record, features, vectors)
    pictures = look_at(images, alphas)
    labels = _dense(record["labels"], len(vectors))
    series = Series(
        group=np.array(record["group"]),
        shard=np.array(shard),
        classes=np.array(record["classes"]),
        alphas=alphas,
        weights=np.array(record["weights"], dtype=np.float32),
        mixture=np.array(mixture_of(record), dtype=np.float32),
        coordinates=_coordinates(record),
        label=labels[:, record["classes"][0]].astype(np.float32),
        entropy=_entropy(labels).astype(np.float32),
        **{name: value.numpy() for name, value in ends._asdict().items()},
        judged=np.full(len(alphas), -1),
        faults=pictures.faults | _not_finite(features),
        hashes=pictures.hashes,
        coarse=pictures.coarse,
        exact=pictures.exact,
        steps=pictures.steps,
        disagreement=_disagreement(record),
        stability=np.array(_or_nan(record["noise"].get("stability")), dtype=np.float32),
    )
    return Examined(series, labels.sum(0), images[series.intended >= 0])


def stacked(rows: Sequence[Series]) -> Series:
    """Series one above the other.

    Raises:
        ValueError: they differ in their number of images or classes.
    """
    return Series(*(np.stack(column) for column in zip(*rows, strict=True)))


def joined(parts: Sequence[Series]) -> Series:
    """Stacks of series one behind the other."""
    return Series(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _decoded(sample: GroupSample) -> np.ndarray:
    """uint8 [A, H, W, 3]."""
    try:
        return np.stack([decode_image(image) for image in sample.images])
    except ValueError as error:
        raise ValueError(f"group {sample.record['group']}: {error}") from None


def _dense(labels: Sequence[Sequence[Sequence[float]]], num_classes: int) -> np.ndarray:
    dense = np.zeros((len(labels), num_classes))
    for row, sparse in enumerate(labels):
        for target, probability in sparse:
            dense[row, int(target)] = probability
    return dense


def _entropy(labels: np.ndarray) -> np.ndarray:
    logarithms = np.log(labels, where=labels > 0, out=np.zeros_like(labels))
    return -(labels * logarithms).sum(-1)


def _coordinates(record: Mapping[str, Any]) -> np.ndarray:
    pairs = [[weight, 1 - weight] for weight in record["weights"]]
    return np.array(record.get("coordinates", pairs), dtype=np.float32)


def _not_finite(features: Tensor) -> np.ndarray:
    broken = ~torch.isfinite(features).all(-1)
    return broken.numpy().astype(np.uint8) * NOT_FINITE


def _disagreement(record: Mapping[str, Any]) -> np.ndarray:
    found = record.get("agreement", {}).get("difference")
    unknown = np.full(len(record["alphas"]), np.nan, dtype=np.float32)
    return unknown if found is None else np.array(found, dtype=np.float32)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
