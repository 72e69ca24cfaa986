"""Frechet distance between two sets of features."""

import torch
from torch import Tensor

# A covariance of d directions has d (d + 1) / 2 numbers; this many images stand for each direction.
IMAGES_PER_DIRECTION = 10


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Squared Frechet distance of Gaussians fitted to two sets (Heusel et al. 2017, eq. 6).

    |mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)). The trace of the root is the sum of the
    singular values of R1 R2^T, where S = R^T R: no matrix root, no complex numbers.

    The estimate is biased upwards, by as much as the sets are small: two samples of one
    distribution are at a distance above 0. The gate compares two such distances of sets of one
    size, and for that the bias is the measure; an unbiased one (KID) is 0 on average there, and
    a multiple of 0 is no limit.

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


def leading_directions(sets: list[Tensor]) -> list[Tensor]:
    """The sets in the principal directions of all of them together.

    Where images are few, they are one direction for ten images of a set: the rest of the
    covariance would be noise. Directions that only one of the sets varies in are among them.

    Args:
        sets: [N, D] each.
    Returns:
        [N, d] each, float64.
    """
    together = torch.cat(sets).double()
    centre = together.mean(0)
    most = max(1, min(len(part) for part in sets) // IMAGES_PER_DIRECTION)
    directions = torch.linalg.svd(together - centre, full_matrices=False)[2][:most]
    return [(part.double() - centre) @ directions.T for part in sets]
