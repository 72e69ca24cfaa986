"""Labels of all series of a shard: in one go where the rule allows it, else one by one."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from data.labels import sharpen
from pipeline.annotate import FEATURES, Annotator
from pipeline.annotation.rules import projection_weight, similarity_labels
from pipeline.annotation.statistics import unit
from pipeline.plan import MixGroup

Parts = list[dict[str, Any]]
IN_ONE_GO = ("projection", "similarity")  # rules that look at each image by itself


def annotate_many(
    annotator: Annotator, features: Mapping[str, Tensor], groups: Sequence[MixGroup]
) -> Parts:
    """What `Annotator.annotate` says of each series.

    Args:
        features: float32 [G, A, D] by encoder.
    Raises:
        ValueError, FloatingPointError: as `annotate`; they begin with the group's number.
    """
    finite = bool(torch.isfinite(features[FEATURES]).all())
    pairs = all(len(group.classes) == 2 for group in groups)
    config = annotator.config
    if finite and pairs and config.second is None and config.rule in IN_ONE_GO:
        with suppress(ValueError):  # one by one, the series at fault is named
            return _in_one_go(annotator, features[FEATURES], groups)
    return [
        _annotated(annotator, {name: rows[row] for name, rows in features.items()}, group)
        for row, group in enumerate(groups)
    ]


def _in_one_go(annotator: Annotator, features: Tensor, groups: Sequence[MixGroup]) -> Parts:
    """A shard is a few large tensor operations instead of ten small ones a series."""
    space = annotator.spaces[FEATURES]
    classes = torch.tensor([group.classes for group in groups])  # [G, 2]
    shape = features.shape[:2]
    rows = unit(features.flatten(0, 1)) if space.normalize else features.flatten(0, 1)
    first, second = (space.prototypes[k].repeat_interleave(shape[1], dim=0) for k in classes.T)
    weight = projection_weight(rows, first, second)  # [G A]
    if space.rule == "similarity":
        labels = similarity_labels(rows, space.prototypes, space.temperature)
        named = [range(labels.shape[1])] * len(groups)
    else:
        probability = sharpen(weight, space.scale)
        labels = torch.stack([probability, 1 - probability], 1)
        named = classes.tolist()
    found = zip(
        named, weight.view(shape).tolist(), labels.unflatten(0, shape).tolist(), strict=True
    )
    return [
        {"weights": raw, "labels": [[[k, p] for k, p in zip(names, row, strict=True)] for row in s]}
        for names, raw, s in found
    ]


def _annotated(
    annotator: Annotator, features: Mapping[str, Tensor], group: MixGroup
) -> dict[str, Any]:
    try:
        return annotator.annotate(features, classes=group.classes, mixture=group.mixture)
    except (ValueError, FloatingPointError) as error:
        raise type(error)(f"group {group.index}: {error}") from None
