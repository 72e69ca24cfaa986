"""Projection on the simplex that the prototypes of several classes span."""

from itertools import combinations

import torch
from torch import Tensor

COINCIDE = 1e-8  # squared length below which two prototypes, or their plane, are degenerate


def coordinates(features: Tensor, vertices: Tensor) -> Tensor:
    """Barycentric coordinates of the nearest point in the vertices' affine hull.

    For two vertices this is CSM's projection weight and its complement.

    Args:
        features: [N, D]; vertices: [k, D].
    Returns:
        [N, k], rows sum to 1; not clipped, so that they may leave [0, 1].
    Raises:
        ValueError: a vertex lies in the hull of the others, so that coordinates are undefined.
    """
    if len(vertices) == 1:
        return features.new_ones(len(features), 1)
    axes = (vertices[:-1] - vertices[-1]).double()  # [k-1, D]
    gram = axes @ axes.T
    if torch.linalg.eigvalsh(gram)[0] < COINCIDE:
        raise ValueError("class prototypes coincide or lie in one line; use other classes")
    offsets = features.double() - vertices[-1].double()
    inner = torch.linalg.solve(gram, axes @ offsets.T).T  # [N, k-1]
    return torch.cat([inner, 1 - inner.sum(1, keepdim=True)], dim=1).to(features.dtype)


def simplex_projection(features: Tensor, vertices: Tensor) -> Tensor:
    """Coordinates of the nearest point of the simplex itself: a probability for each vertex.

    The nearest point lies inside some face, and is the nearest one of that face's affine hull;
    so of all faces whose coordinates are not negative, the closest wins. Exact, for few vertices.

    Args:
        features: [N, D]; vertices: [k, D].
    Returns:
        [N, k], non-negative, rows sum to 1.
    """
    count = len(vertices)
    best = features.new_zeros(len(features), count)
    least = features.new_full((len(features),), torch.inf)
    for size in range(1, count + 1):
        for face in combinations(range(count), size):
            weights = coordinates(features, vertices[list(face)])
            distance = (features - weights @ vertices[list(face)]).square().sum(1)
            closer = (weights >= 0).all(1) & (distance < least)
            least = torch.where(closer, distance, least)
            row = torch.zeros_like(best)
            row[:, list(face)] = weights
            best = torch.where(closer[:, None], row, best)
    return best
