"""Quality of a mixed dataset: whether weights follow alpha, and end points show their class."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SeriesQuality:
    """Rank agreement of weight with alpha, over all series."""

    series: int
    median: float  # of Spearman's rho, in [-1, 1]
    mean: float
    not_monotone: float  # fraction of series whose weight falls somewhere along alpha
    negative: float  # fraction of series whose rho is below 0


@dataclass(frozen=True)
class WeightCurve:
    """How the weight of the first class grows along alpha, over all series."""

    alphas: Tensor  # [A] ascending
    mean: Tensor  # [A]
    levels: tuple[float, ...]  # Q quantile levels in [0, 1]
    quantiles: Tensor  # [Q, A]


class EndPointAgreement(TypedDict):
    """How many end-point images a classifier assigns to the class they were made for."""

    agreed: int
    images: int
    share: float  # agreed / images, in [0, 1]


def ranks(values: Tensor) -> Tensor:
    """Ranks from 0 along the last axis of [..., A]; ties share the mean of their ranks."""
    row, column = values.unsqueeze(-1), values.unsqueeze(-2)
    below = (row > column).sum(-1)
    ties = (row == column).sum(-1) - 1  # a value always ties with itself
    return below.double() + ties.double() / 2


def spearman(alphas: Tensor, weights: Tensor) -> Tensor:
    """Spearman's rank correlation of alpha and weight in each series.

    Args:
        alphas, weights: [G, A] float.
    Returns:
        [G] float64 in [-1, 1]; 0 for a series whose weights are all equal.
    Raises:
        ValueError: the shapes differ or a series has fewer than two images.
    """
    if alphas.shape != weights.shape or alphas.ndim != 2 or alphas.shape[1] < 2:
        sizes = f"{tuple(alphas.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"alphas and weights have shapes {sizes}: give both as [G, A] with A >= 2")
    first, second = (rank - rank.mean(-1, keepdim=True) for rank in map(ranks, (alphas, weights)))
    length = (first.square().sum(-1) * second.square().sum(-1)).sqrt()  # [G]
    return torch.where(length > 0, (first * second).sum(-1) / length.clamp_min(1e-12), 0.0)


def has_decrease(alphas: Tensor, weights: Tensor) -> Tensor:
    """Which series are not monotone: [G] bool, true where the weight falls somewhere along alpha.

    Args:
        alphas, weights: [G, A] float.
    """
    ordered = weights.gather(1, alphas.argsort(dim=1))
    return (ordered.diff(dim=1) < 0).any(dim=1)


def series_quality(alphas: Tensor, weights: Tensor) -> SeriesQuality:
    """Summarise how well the weights of G series follow alpha.

    Args:
        alphas, weights: [G, A] float.
    Raises:
        ValueError: no series, or shapes that `spearman` does not accept.
    """
    rho = spearman(alphas, weights)
    if not len(rho):
        raise ValueError("no series: the mixed dataset has no committed groups")
    return SeriesQuality(
        series=len(rho),
        median=float(rho.quantile(0.5)),
        mean=float(rho.mean()),
        not_monotone=float(has_decrease(alphas, weights).double().mean()),
        negative=float((rho < 0).double().mean()),
    )


def weight_curve(
    alphas: Tensor, weights: Tensor, *, levels: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9)
) -> WeightCurve:
    """Mean and quantiles of the weight at each alpha.

    Args:
        alphas, weights: [G, A] float. If alphas differ between series, weights are interpolated
            linearly at A common alphas, spaced evenly from 0 to 1.
        levels: quantile levels in [0, 1].
    """
    order = alphas.argsort(dim=1)
    alphas, weights = alphas.gather(1, order), weights.gather(1, order)
    if not torch.allclose(alphas, alphas[:1].expand_as(alphas)):
        common = torch.linspace(0, 1, alphas.shape[1])
        rows = [np.interp(common, *pair) for pair in zip(alphas, weights, strict=True)]
        alphas, weights = common[None], torch.from_numpy(np.stack(rows)).to(weights)
    probabilities = torch.tensor(levels, dtype=weights.dtype)
    return WeightCurve(alphas[0], weights.mean(0), levels, weights.quantile(probabilities, dim=0))


def end_points(mixtures: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the unmixed images, and the class that each was made for.

    Args:
        mixtures: [G, A, k] float, conditioning weights of the classes of each series.
        classes: [G, k] int64.
    Returns:
        group [M], position [M] and intended class [M], all int64: every image with a weight of 1.
    """
    group, position, side = torch.nonzero(mixtures == 1, as_tuple=True)
    return group, position, classes[group, side]


def prototype_distances(features: Tensor, prototypes: Tensor) -> Tensor:
    """Squared Euclidean distance to each prototype, up to a constant in each row.

    The nearest class is `argmin(-1)`, over all K classes or over some columns.

    Args:
        features: [M, D]; prototypes: [K, D].
    Returns:
        [M, K]: |p|^2 - 2 f.p, that is |f - p|^2 without |f|^2.
    """
    return prototypes.square().sum(-1) - 2 * features @ prototypes.T


class EndPoints(NamedTuple):
    """Three classes per image of a series, all -1 for an image that mixes several classes.

    The nearest classes are also -1 if the features are not finite.

    Attributes:
        intended: the class that the image was made for.
        nearest: the class with the nearest prototype among all classes.
        of_series: the class with the nearest prototype among the classes of the series.
    """

    intended: Tensor  # all three int64 [A]
    nearest: Tensor
    of_series: Tensor


def read_end_points(
    mixture: Sequence[Sequence[float]],
    classes: Sequence[int],
    features: Tensor,
    prototypes: Tensor,
) -> EndPoints:
    """Compare the unmixed images of one series with the prototypes.

    Args:
        mixture: conditioning weights of the series' classes in each image, [A][k].
        features: CLIP features of the images, [A, D]; prototypes: [K, D].
    """
    mixtures, class_indices = torch.tensor(mixture)[None], torch.tensor(classes)
    _, position, made_for = end_points(mixtures, class_indices[None])
    distances = prototype_distances(features[position], prototypes)  # [M, K]
    result = EndPoints(*(torch.full((len(mixture),), -1) for _ in range(3)))
    result.intended[position] = made_for
    finite = distances.isfinite().all(-1)
    result.nearest[position] = torch.where(finite, distances.argmin(-1), -1)
    of_series = class_indices[distances[:, class_indices].argmin(-1)]
    result.of_series[position] = torch.where(finite, of_series, -1)
    return result


def endpoint_agreement(predicted: Tensor, intended: Tensor) -> EndPointAgreement:
    """The end-point images that a classifier assigns to the class they were made for.

    Args:
        predicted, intended: [M] int64 class indices.
    Raises:
        ValueError: the lengths differ or there is no image.
    """
    if predicted.shape != intended.shape or predicted.ndim != 1 or not len(predicted):
        shapes = f"{tuple(predicted.shape)} and {tuple(intended.shape)}"
        raise ValueError(f"predicted and intended have shapes {shapes}: give both as [M], M >= 1")
    agreed = int((predicted == intended).sum())
    return {"agreed": agreed, "images": len(predicted), "share": agreed / len(predicted)}


def diversity(features: Tensor, classes: Tensor) -> float | None:
    """Diversity of images with the same conditioning.

    Args:
        features: [G, A, D], of CLIP or any other encoder.
        classes: [G, k], the classes of each series.
    Returns:
        1 - cosine, in [0, 2], averaged over all pairs of series of the same classes at the same
        position, then over positions and sets of classes; None if no set has two series.
    """
    unit = torch.nn.functional.normalize(features.double(), dim=-1)
    sets, set_index = classes.unique(dim=0, return_inverse=True)
    sums = unit.new_zeros(len(sets), *unit.shape[1:]).index_add_(0, set_index, unit)  # [S, A, D]
    count = torch.bincount(set_index, minlength=len(sets))[:, None]  # [S, 1]
    several = count[:, 0] > 1
    if not bool(several.any()):
        return None
    # The squared sum of n unit vectors is n plus twice the cosine of every pair.
    cosines = (sums.square().sum(-1) - count)[several] / (count * (count - 1))[several]  # [S, A]
    return 1 - float(cosines.mean())


def label_gap(labels: Tensor, probabilities: Tensor) -> float:
    """Mean total variation distance between soft labels and a classifier's probabilities.

    Args:
        labels, probabilities: [N, K], rows summing to 1.
    Returns:
        In [0, 1]: 0 where they agree everywhere, 1 where they never share a class.
    Raises:
        ValueError: the shapes differ.
    """
    if labels.shape != probabilities.shape:
        shapes = f"{tuple(labels.shape)} and {tuple(probabilities.shape)}"
        raise ValueError(f"labels and probabilities have shapes {shapes}: give both as [N, K]")
    return float((labels - probabilities).abs().sum(-1).mean() / 2)


def mixture_labels(mixtures: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Labels by the conditioning weights alone, for comparison in `label_gap`.

    Args:
        mixtures: [G, A, k] float, conditioning weights of the classes of each series.
        classes: [G, k] int64.
    Returns:
        [G, A, K] float: the weights, each on its class.
    """
    labels = mixtures.new_zeros(*mixtures.shape[:2], num_classes)
    return labels.scatter_add_(2, classes[:, None].expand(-1, mixtures.shape[1], -1), mixtures)
