"""Criteria: how far images of a faster recipe may differ from those of the exact recipe."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BINS, RANGE = 20, (-0.5, 1.5)  # of the weights' histogram; its end bins count those outside
MIDDLE = (0.2, 0.8)
RESAMPLES, LEVEL = 2000, 0.975
FRECHET_FACTOR = 1.2
ROUNDING = 1e-9
# A covariance of d directions has d (d + 1) / 2 numbers; so many images are required per direction.
IMAGES_PER_DIRECTION = 10

Criterion = dict[str, Any]
Summary = Callable[[Tensor], Tensor]  # of the mean row of all series, [..., M] -> [...]


def weight_criteria(exact: Tensor, fast: Tensor, other: Tensor, *, seed: int) -> list[Criterion]:
    """Criteria on the distribution of weights along the series.

    Each criterion is a statistic of all series. It may differ from that of the exact recipe by no
    more than the exact recipe with other seeds does, with the sampling error of that difference:
    the 97.5 % quantile of its size over bootstrap resamples of the series. The limit of a fraction
    of series is at least three series: if it is 0 for both seeds, it may be that large (rule of
    three).

    Args:
        exact, fast, other: CLIP weights [G, A, k], one per class where k > 2, else k = 1;
            alpha grows along A where k = 1.
    """
    floor = 3 / len(exact)
    criteria = [
        _criterion("entropy of weights", _histogram, _entropy, (exact, fast, other), seed=seed),
        _criterion("weights in 0.2 to 0.8", _middle, _fraction, (exact, fast, other), seed, floor),
    ]
    if exact.shape[-1] == 1:
        name = "series that only rise"
        criteria.insert(0, _criterion(name, _rises, _fraction, (exact, fast, other), seed, floor))
    return criteria


def feature_criterion(exact: Tensor, fast: Tensor, other: Tensor) -> Criterion:
    """Frechet distance of CLIP features to exact ones: at most 1.2 times that of other seeds.

    Args:
        exact, fast, other: [N, D].
    """
    exact, fast, other = leading_directions([exact, fast, other])
    distance, other_distance = frechet_distance(exact, fast), frechet_distance(exact, other)
    limit = FRECHET_FACTOR * other_distance
    return {
        "name": "CLIP Frechet distance",
        "exact": None,
        "fast": distance,
        "other": other_distance,
        "distance": distance,
        "limit": limit,
        "passed": distance <= limit + ROUNDING,
    }


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Squared Frechet distance of Gaussians fitted to two samples (Heusel et al. 2017, eq. 6).

    |mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)). The trace of the root is the sum of the
    singular values of R1 R2^T, where S = R^T R: no matrix root, no complex numbers.

    The estimate is biased upwards, more for smaller samples: two samples of one distribution have a
    distance above 0. The criterion compares two distances of samples of equal size and needs that
    bias: an unbiased distance (KID) is 0 on average, and a multiple of 0 is no limit.

    Args:
        first, second: [N, D], [M, D].
    """
    means, roots = [], []
    for features in (first.double(), second.double()):
        mean = features.mean(0)
        means.append(mean)
        root = torch.linalg.qr(features - mean, mode="r")[1]
        roots.append(root / (len(features) - 1) ** 0.5)
    shared = torch.linalg.svdvals(roots[0] @ roots[1].T).sum()
    spread = roots[0].square().sum() + roots[1].square().sum() - 2 * shared
    distance = (means[0] - means[1]).square().sum() + spread
    return max(0.0, float(distance))  # rounding may leave -1e-12


def leading_directions(samples: list[Tensor]) -> list[Tensor]:
    """The samples in the principal directions of all samples together.

    There is one direction per ten images of the smallest sample: with more, the covariance would
    be noise. Directions in which only one sample varies are included.

    Args:
        sets: [N, D] each.
    Returns:
        [N, d] each, float64.
    """
    pooled = torch.cat(samples).double()
    centre = pooled.mean(0)
    count = max(1, min(len(sample) for sample in samples) // IMAGES_PER_DIRECTION)
    directions = torch.linalg.svd(pooled - centre, full_matrices=False)[2][:count]
    return [(sample.double() - centre) @ directions.T for sample in samples]


def _criterion(
    name: str,
    rows_of: Callable[[Tensor], Tensor],
    summary: Summary,
    weights: tuple[Tensor, Tensor, Tensor],
    seed: int,
    floor: float = 0.0,
) -> Criterion:
    rows = [rows_of(sample).double() for sample in weights]  # [G, M] each
    exact, fast, other = (float(summary(row.mean(0))) for row in rows)
    limit = max(floor, _sampled_difference(rows[0], rows[2], summary, seed))
    return {
        "name": name,
        "exact": exact,
        "fast": fast,
        "other": other,
        "distance": abs(fast - exact),
        "limit": limit,
        "passed": abs(fast - exact) <= limit + ROUNDING,
    }


def _sampled_difference(first: Tensor, second: Tensor, summary: Summary, seed: int) -> float:
    """97.5 % quantile of |summary(first) - summary(second)| over resampled series."""
    groups = len(first)
    rng = torch.Generator().manual_seed(seed)
    resampled = torch.randint(groups, (RESAMPLES, groups), generator=rng)
    counts = torch.zeros(RESAMPLES, groups, dtype=torch.float64)
    counts.scatter_add_(1, resampled, torch.ones_like(counts))
    # Series i has the same classes and alphas on both sides, so both are resampled together.
    differences = (summary(counts @ first / groups) - summary(counts @ second / groups)).abs()
    return float(differences.quantile(LEVEL))


def _rises(weights: Tensor) -> Tensor:
    return (weights[..., 0].diff(dim=1) >= 0).all(dim=1)[:, None]


def _histogram(weights: Tensor) -> Tensor:
    """Fraction of weights in each bin, per series, [G, BINS]."""
    low, high = RANGE
    bins = ((weights - low) / (high - low) * BINS).long().clamp(0, BINS - 1).flatten(1)
    return torch.nn.functional.one_hot(bins, BINS).double().mean(1)


def _middle(weights: Tensor) -> Tensor:
    inside = (weights >= MIDDLE[0]) & (weights <= MIDDLE[1])
    return inside.double().flatten(1).mean(1, keepdim=True)


def _fraction(mean: Tensor) -> Tensor:
    return mean[..., 0]


def _entropy(mean: Tensor) -> Tensor:
    """Entropy in nats."""
    return -torch.special.xlogy(mean, mean).sum(-1)
