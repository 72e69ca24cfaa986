"""Turn CLIP features into soft labels: one function per rule, for one series or a whole shard."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from semix.data.device import resolve_device
from semix.data.features import FEATURES, SECOND
from semix.data.formats import EncoderAgreement, Labels
from semix.data.labels import sharpen
from semix.pipeline.config import AnnotationConfig
from semix.pipeline.plan import MixGroup
from semix.pipeline.prototype_statistics import (
    COINCIDE,
    ClassSums,
    Measurement,
    PrototypeFile,
    scale_of,
    unit,
)

if TYPE_CHECKING:  # open_clip costs seconds
    from semix.pipeline.clip import ClipEncoder


@dataclass(frozen=True)
class EncodedSeries:
    """G series of A images between k classes, encoded by one CLIP model.

    Attributes:
        features: [G, A, D], of length 1 if `config.normalize`.
        raw: [G, A, k], unclipped weights of the classes; for two, projection and complement.
        vertices: [G, k, D], prototypes of the k classes; prototypes: [K, D], of all classes.
        mixture: [G, A, k], the conditioning weights.
        scale: sharpening of `semix.data.labels.sharpen`.
    """

    features: Tensor
    raw: Tensor
    vertices: Tensor
    prototypes: Tensor
    mixture: Tensor
    scale: float
    config: AnnotationConfig


def _projection(series: EncodedSeries) -> Tensor:
    """CSM's rule: the projection on the line between two prototypes, sharpened."""
    if series.raw.shape[-1] > 2:
        return _simplex(series)
    # Row by row: the last digit depends on how many numbers are sharpened together.
    probability = torch.empty_like(series.raw[..., 0])
    for row, weights in zip(probability, series.raw[..., 0], strict=True):
        row.copy_(sharpen(weights, series.scale))
    return torch.stack([probability, 1 - probability], -1)


def _simplex(series: EncodedSeries) -> Tensor:
    """The nearest point of the simplex of the series' prototypes, without sharpening."""
    return simplex_projection(series.features, series.vertices)


def _similarity(series: EncodedSeries) -> Tensor:
    """The similarity to each class's prototype, as a fraction of the sum over all classes."""
    shape, temperature = series.features.shape[:2], series.config.temperature
    labels = similarity_labels(series.features.flatten(0, 1), series.prototypes, temperature)
    rows: Tensor = labels.unflatten(0, shape)
    return rows


def _mixing_ratio(series: EncodedSeries) -> Tensor:
    """The conditioning weights, independent of the CLIP features (an ablation)."""
    return series.mixture


# Give probabilities [G, A, k] of the series' classes, or [G, A, K] of all classes.
RULES: dict[str, Callable[[EncodedSeries], Tensor]] = {
    "projection": _projection,
    "simplex": _simplex,
    "similarity": _similarity,
    "mixing_ratio": _mixing_ratio,
}
OVER_ALL_CLASSES = ("similarity",)


@dataclass(frozen=True)
class Annotator:
    """Labels the images of series.

    Attributes:
        measurements: one per encoder, by key: `features` for the first, `second` for the second if
            there is one.
    """

    config: AnnotationConfig
    measurements: Mapping[str, Measurement]
    encoders: "Encoders"

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        """uint8 [N, H, W, 3] -> float32 [N, D] on the CPU for each encoder, `features` first."""
        return self.encoders.encode(images)

    def annotate(self, features: Mapping[str, Tensor], groups: Sequence[MixGroup]) -> list[Labels]:
        """Label some series that mix equally many classes.

        Labels of more than two classes have `coordinates`. With a second encoder, `agreement` has
        its weights, and the difference in [0, 1] of the labels of both encoders under the same
        rule, each with its own scale: the total variation distance, which for two classes is the
        difference of the probabilities of the first. The rule mixing_ratio does not use CLIP, so
        the projections are compared instead.

        Args:
            features: [G, A, D] by encoder, from `encode` or from the store.
        Raises:
            ValueError: prototypes coincide, an image is similar to none, or its features are not
                finite; the message names the group.
        """
        for row, reason in storage_faults(features).items():
            raise ValueError(f"group {groups[row].index}: {reason}")
        try:
            return self._annotate(features, groups)
        except ValueError as error:
            if len(groups) == 1:
                raise ValueError(f"group {groups[0].index}: {error}") from None
        return [
            labels  # group by group, so that the error names the group
            for row, group in enumerate(groups)
            for labels in self.annotate(
                {name: rows[row : row + 1] for name, rows in features.items()}, [group]
            )
        ]

    def _annotate(self, features: Mapping[str, Tensor], groups: Sequence[MixGroup]) -> list[Labels]:
        encoded, rule = self._encoded_series(FEATURES, features, groups), self.config.rule
        labels, all_classes = RULES[rule](encoded), range(len(encoded.prototypes))
        agreement = (
            self._agreement(encoded, features, groups) if SECOND in self.measurements else None
        )
        return [
            Labels(
                weights=encoded.raw[row, :, 0].tolist(),
                labels=[
                    [(k, p) for k, p in zip(classes, image, strict=True)]
                    for classes in [all_classes if rule in OVER_ALL_CLASSES else group.classes]
                    for image in labels[row].tolist()
                ],
                coordinates=encoded.raw[row].tolist() if len(group.classes) > 2 else None,
                agreement=agreement[row] if agreement else None,
            )
            for row, group in enumerate(groups)
        ]

    def _agreement(
        self, encoded: EncodedSeries, features: Mapping[str, Tensor], groups: Sequence[MixGroup]
    ) -> list[EncoderAgreement]:
        rule = "projection" if self.config.rule == "mixing_ratio" else self.config.rule
        second = self._encoded_series(SECOND, features, groups)
        difference = total_variation(RULES[rule](encoded), RULES[rule](second))
        rows = zip(second.raw[..., 0].tolist(), difference.tolist(), strict=True)
        return [EncoderAgreement(weights=weights, difference=row) for weights, row in rows]

    def _encoded_series(
        self, name: str, features: Mapping[str, Tensor], groups: Sequence[MixGroup]
    ) -> EncodedSeries:
        measurement, values = self.measurements[name], features[name].float()
        prototypes = measurement.prototypes_for(normalize=self.config.normalize)
        values = unit(values) if self.config.normalize else values
        vertices = prototypes[torch.tensor([group.classes for group in groups])]
        return EncodedSeries(
            features=values,
            raw=_raw_weights(values, vertices),
            vertices=vertices,
            prototypes=prototypes,
            # In float64, since the rule mixing_ratio takes these weights as labels.
            mixture=torch.tensor([group.mixture for group in groups], dtype=torch.float64),
            scale=scale_of(measurement, self.config),
            config=self.config,
        )


class Encoders:
    """The CLIP models of an annotation, loaded at the first image.

    Args:
        device: auto, cpu, cuda or cuda:N.
    """

    def __init__(self, config: AnnotationConfig, *, device: str) -> None:
        self.config = config
        self.device = device

    def load(self) -> None:
        """Load the models now. Raises InputError for a model that cannot be loaded."""
        _ = self._loaded

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        """uint8 [N, H, W, 3] -> float32 [N, D] on the CPU, by the name of each model."""
        return {name: encoder.encode(images).cpu() for name, encoder in self._loaded.items()}

    @cached_property
    def _loaded(self) -> "dict[str, ClipEncoder]":
        from semix.pipeline.clip import ClipEncoder

        device = resolve_device(self.device)
        return {
            name: ClipEncoder(encoder, device=device, dtype=self.config.dtype, field=field)
            for name, (field, encoder) in zip(
                (FEATURES, SECOND), self.config.encoders, strict=False
            )
        }


def build_annotator(config: AnnotationConfig, prototypes: bytes, *, device: str) -> Annotator:
    """Build an annotator that loads its CLIP models at the first image.

    Args:
        prototypes: result of `semix.pipeline.prototypes.measure` for this config.
        device: auto, cpu, cuda or cuda:N.
    Raises:
        ValueError: the prototypes are damaged, or of fewer encoders than the config names.
    """
    parts = PrototypeFile.unpack(prototypes).parts
    names = (FEATURES,) if config.second is None else (FEATURES, SECOND)
    for name in names:
        if name not in parts:
            encoder = "first" if name == FEATURES else "second"
            remedy = "measure it for this config"
            problem = f"the prototypes have no measurement of the {encoder} encoder"
            raise ValueError(f"{problem}; {remedy}")
    measurements = {name: parts[name].measurement for name in names}
    return Annotator(config, measurements, Encoders(config, device=device))


def storage_faults(features: Mapping[str, Tensor]) -> dict[int, str]:
    """Reasons why features [G, A, D] of a series cannot be stored as float16, by row."""
    faults: dict[int, str] = {}
    for name, rows in features.items():
        for row, image in (~torch.isfinite(rows.half()).all(-1)).nonzero().tolist():
            of = "" if name == FEATURES else " by the second encoder"
            which = f"the CLIP features{of} of image {image}"
            reason = f"{which} are not finite, or too large for float16"
            faults.setdefault(row, reason)
    return faults


def class_prototypes(features: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """Mean feature of each class; features are not normalised (as in `annotate.py` of
    CSM's official code).

    Summed in float64, so that the result does not depend on batches and their order.

    Args:
        features: [N, D]; targets: int64 [N].
    Returns:
        [K, D], of the features' type.
    Raises:
        ValueError: a class has no features.
    """
    sums = ClassSums(num_classes)
    sums.add(features, targets)
    return sums.means().to(features.dtype)


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
    """The fraction of the similarity that each class has, sim(f, P_k) / sum_j sim(f, P_j).

    An alternative to the projection. Cosines of images of one domain are similar, so
    their plain fractions are nearly uniform over the classes; a low temperature sharpens them.

    Args:
        features: [N, D]; prototypes: [K, D].
        temperature: sim is exp(cosine / temperature), so that the labels are a softmax; None:
            sim is the cosine itself, where negative ones count as 0.
    Returns:
        [N, K] in [0, 1], rows sum to 1.
    Raises:
        ValueError: without a temperature, an image with no positive cosine.
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
    """Half the summed absolute difference of two labels, [..., k] twice -> [...] in [0, 1]."""
    return (first - second).abs().sum(-1) / 2


def coordinates(features: Tensor, vertices: Tensor) -> Tensor:
    """Barycentric coordinates of the nearest point in the vertices' affine hull.

    For two vertices this is CSM's projection weight and its complement.

    Args:
        features: [G, N, D]; vertices: [G, k, D].
    Returns:
        [G, N, k], rows sum to 1; not clipped, so that they may leave [0, 1].
    Raises:
        ValueError: a vertex lies in the hull of the others: coordinates are undefined.
    """
    if vertices.shape[1] == 1:
        return features.new_ones(*features.shape[:2], 1)
    axes = (vertices[:, :-1] - vertices[:, -1:]).double()  # [G, k-1, D]
    gram = axes @ axes.mT
    if (torch.linalg.eigvalsh(gram)[:, 0] < COINCIDE).any():
        raise ValueError("class prototypes coincide or lie in one line; use other classes")
    offsets = features.double() - vertices[:, -1:].double()
    inner = torch.linalg.solve(gram, axes @ offsets.mT).mT  # [G, N, k-1]
    return torch.cat([inner, 1 - inner.sum(2, keepdim=True)], dim=2).to(features.dtype)


def simplex_projection(features: Tensor, vertices: Tensor) -> Tensor:
    """Coordinates of the nearest point of the simplex itself: a probability for each vertex.

    The nearest point lies inside some face, and is the nearest one of that face's affine hull;
    so of all faces whose coordinates are not negative, the closest wins. Exact, for few vertices.

    Args:
        features: [G, N, D]; vertices: [G, k, D].
    Returns:
        [G, N, k], non-negative, rows sum to 1.
    """
    count = vertices.shape[1]
    nearest_weights = features.new_zeros(*features.shape[:2], count)
    min_distance = features.new_full(features.shape[:2], torch.inf)
    for size in range(1, count + 1):
        for face in map(list, combinations(range(count), size)):
            weights = coordinates(features, vertices[:, face])
            distance = (features - weights @ vertices[:, face]).square().sum(2)
            closer = (weights >= 0).all(2) & (distance < min_distance)
            min_distance = torch.where(closer, distance, min_distance)
            row = torch.zeros_like(nearest_weights)
            row[..., face] = weights
            nearest_weights = torch.where(closer[..., None], row, nearest_weights)
    return nearest_weights


def _raw_weights(features: Tensor, vertices: Tensor) -> Tensor:
    """Unclipped weights [G, A, k] of the classes whose prototypes are `vertices` [G, k, D]."""
    if vertices.shape[1] > 2:
        return coordinates(features, vertices)
    first, second = (
        vertex[:, None].expand_as(features).flatten(0, 1) for vertex in vertices.unbind(1)
    )
    weight = projection_weight(features.flatten(0, 1), first, second).view(features.shape[:2])
    return torch.stack([weight, 1 - weight], -1)
