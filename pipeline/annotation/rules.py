"""From a CLIP feature to weights and probabilities: projection, simplex, similarity."""

from torch import Tensor
from torch.nn.functional import normalize

from pipeline.annotation.statistics import COINCIDE


def projection_weight(features: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Where each feature lies on the line from the second prototype to the first (CSM).

    Args:
        features, first, second: [N, D], the prototypes of each image's two classes.
    Returns:
        Raw weights [N], not clipped: 1 at `first`, 0 at `second`.
    Raises:
        ValueError: two prototypes coincide, so that no line is defined.
    """
    axis = first - second  # [N, D]
    length_sq = (axis * axis).sum(1)
    if (length_sq < COINCIDE).any():
        raise ValueError("two class prototypes coincide; does each class have images of its own?")
    return ((features - second) * axis).sum(1) / length_sq


def similarity_labels(features: Tensor, prototypes: Tensor, temperature: float | None) -> Tensor:
    """Each class's share of the similarity, sim(f, P_k) / sum_j sim(f, P_j), over all classes.

    A named alternative to the projection. Cosines of images of one domain are much alike, so
    their plain shares are nearly uniform over the classes; a low temperature sharpens them.

    Args:
        features: [N, D]; prototypes: [K, D].
        temperature: sim is exp(cosine / temperature), so that the labels are a softmax; None:
            sim is the cosine itself, where negative ones count as 0.
    Returns:
        [N, K] in [0, 1], rows sum to 1.
    Raises:
        ValueError: without a temperature, an image that is like no prototype at all.
    """
    cosine = normalize(features, dim=1) @ normalize(prototypes, dim=1).T  # [N, K]
    if temperature is not None:
        return (cosine / temperature).softmax(1)
    similarity = cosine.clamp(min=0)
    total = similarity.sum(1, keepdim=True)
    if not total.all():
        image = int((total[:, 0] == 0).nonzero()[0])
        raise ValueError(f"image {image} has no positive cosine to any prototype; set temperature")
    return similarity / total


def total_variation(first: Tensor, second: Tensor) -> Tensor:
    """Half the summed difference of two labels [N, k] each -> [N] in [0, 1].

    For two classes this is the difference of the two probabilities of the first.
    """
    return (first - second).abs().sum(1) / 2
