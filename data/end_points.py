"""The unmixed images of series: which class CLIP's stored features put them in."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.quality import end_points, prototype_distances
from data.root import Root
from data.stored_features import of_unit_length, read_features, read_vectors

Record = Mapping[str, Any]


class EndPoints(NamedTuple):
    """For each image of a series the class; -1 where the image mixes several.

    Nearest is also -1 where the features are no numbers.

    Attributes:
        intended: that it was made for.
        nearest: whose prototype is nearest, of all classes.
        of_series: whose prototype is nearest, of the classes of the series.
    """

    intended: Tensor  # int64 [A], as the others
    nearest: Tensor
    of_series: Tensor


def mixture_of(record: Record) -> list[list[float]]:
    """Conditioning weights of the classes of a series in each image, [A][k]."""
    pairs = [[alpha, 1 - alpha] for alpha in record["alphas"]]
    return record.get("mixture", pairs)


def read_end_points(record: Record, features: Tensor, vectors: Tensor) -> EndPoints:
    """Compare the unmixed images of one series with the prototypes.

    Args:
        features: [A, D]; vectors: [K, D].
    """
    mixture = torch.tensor(mixture_of(record))[None]
    classes = torch.tensor(record["classes"])
    _, position, made_for = end_points(mixture, classes[None])
    distances = prototype_distances(features[position], vectors)  # [M, K]
    found = EndPoints(*(torch.full((mixture.shape[1],), -1) for _ in range(3)))
    found.intended[position] = made_for
    known = distances.isfinite().all(-1)
    found.nearest[position] = torch.where(known, distances.argmin(-1), -1)
    of_series = classes[distances[:, classes].argmin(-1)]
    found.of_series[position] = torch.where(known, of_series, -1)
    return found


def strayed_groups(
    root: Root, shards: Sequence[Record], records: Sequence[Record]
) -> frozenset[int]:
    """Groups with an unmixed image that is nearest to the prototype of another class.

    Reads the features of one shard at a time.

    Args:
        shards: as an index lists them.
        records: of the groups to look at.
    """
    unit = of_unit_length(root.plan["config"].get("annotation", {}))
    vectors, strayed = read_vectors(root, unit=unit), set()
    wanted = {record["group"]: record for record in records}
    for shard in shards:
        numbers = range(shard["first"], shard["first"] + shard["groups"])
        if not any(group in wanted for group in numbers):
            continue
        file, groups = shard["features"], shard["groups"]
        features = read_features(root.store, file, groups=groups, unit=unit)
        for row, group in enumerate(numbers):
            if group in wanted:
                found = read_end_points(wanted[group], features[row], vectors)
                if not torch.equal(found.intended, found.nearest):
                    strayed.add(group)
    return frozenset(strayed)
