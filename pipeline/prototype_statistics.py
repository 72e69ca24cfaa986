"""Statistics of real images that labels need, in two passes over CLIP features, and their file."""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from semix.data.errors import InputError
from semix.data.features import FEATURES, SECOND
from semix.data.tensors import Metadata, open_sealed, seal
from semix.pipeline.config import AnnotationConfig, hard_label_notes, implied_label
from semix.pipeline.provenance import EncoderIdentity

COINCIDE = 1e-8  # squared distance below which two prototypes define no line
ROWS = 256  # features compared with all classes at once, to bound memory
SCALE_RANGE = (1.0, 20.0)
USUAL_LABELS = (0.6, 0.99)  # of an average real image: below, undecided; above, nearly certain
# Names of each encoder's tensors, and the prefix of the names of its facts.
TENSOR_NAMES = {
    FEATURES: (("prototypes", "unit"), ""),
    SECOND: (("second", "second_unit"), "second_"),
}

log = logging.getLogger("semix.build")


@dataclass(frozen=True)
class Measurement:
    """Statistics of a training split under one encoder; any label rule can use them.

    Attributes:
        prototypes: mean feature of each class, float32 [K, D].
        unit: mean unit feature of each class at length 1, float32 [K, D].
        variance, unit_variance: of the weight of real images within their class, on the lines
            between `prototypes` or between `unit`.
    """

    prototypes: Tensor
    unit: Tensor
    variance: float
    unit_variance: float

    def scale(self, configured: float | str, *, normalize: bool = False) -> float:
        """The sharpening to use: the configured number, or for `auto` the inverse variance."""
        if not isinstance(configured, str):
            return configured
        variance = self.unit_variance if normalize else self.variance
        min_scale, max_scale = SCALE_RANGE
        return 1 / min(max(variance, 1 / max_scale), 1 / min_scale)  # 0 with one image per class

    def prototypes_for(self, *, normalize: bool) -> Tensor:
        """The prototypes of an annotation with or without `normalize`."""
        return self.unit if normalize else self.prototypes

    def parts(self, encoder: str = FEATURES) -> tuple[dict[str, Tensor], Metadata]:
        """Tensors and facts for a file, under the names of this encoder."""
        (name, unit_name), prefix = TENSOR_NAMES[encoder]
        facts = {"weight_variance": self.variance, "unit_weight_variance": self.unit_variance}
        texts = {f"{prefix}{fact}": repr(value) for fact, value in facts.items()}
        return {name: self.prototypes, unit_name: self.unit}, texts

    @classmethod
    def of(cls, tensors: Mapping[str, Any], facts: Metadata, encoder: str = FEATURES) -> Self:
        """The inverse of `parts`. Raises ValueError: a tensor or fact is missing."""
        names, prefix = TENSOR_NAMES[encoder]
        try:
            means, unit_means = (torch.from_numpy(tensors[name]) for name in names)
            variance = float(facts[f"{prefix}weight_variance"])
            return cls(means, unit_means, variance, float(facts[f"{prefix}unit_weight_variance"]))
        except KeyError as error:
            raise ValueError(f"holds no {error}") from None


@dataclass(frozen=True)
class EncoderMeasurement:
    """The measurement of one encoder, and its identity."""

    identity: EncoderIdentity
    measurement: Measurement


@dataclass(frozen=True)
class PrototypeFile:
    """prototypes.safetensors: the measurements of one or two encoders, with facts for readers.

    Attributes:
        parts: by the name of the features, `features` and perhaps `second`.
        real: digest of the images that were measured.
    """

    parts: Mapping[str, EncoderMeasurement]
    class_names: tuple[str, ...]
    real: str

    def pack(self, config: AnnotationConfig) -> bytes:
        """The file's content for one annotation, whose scale is among the facts."""
        tensors: dict[str, Tensor] = {}
        facts = {"real": self.real, "class_names": json.dumps(self.class_names)}
        for name, part in self.parts.items():
            part_tensors, part_facts = part.measurement.parts(name)
            prefix, scale = TENSOR_NAMES[name][1], scale_of(part.measurement, config)
            tensors |= part_tensors
            facts |= part_facts | {
                f"{prefix}encoder": json.dumps(part.identity, sort_keys=True),
                f"{prefix}scale": repr(scale),
                f"{prefix}label_of_average_real_image": repr(implied_label(scale)),
            }
        return seal(tensors, facts)

    @classmethod
    def unpack(cls, content: bytes) -> Self:
        """Raises ValueError: another file, or a damaged one."""
        tensors, facts = open_sealed(content)
        parts = {
            name: EncoderMeasurement(
                json.loads(facts[f"{prefix}encoder"]), Measurement.of(tensors, facts, name)
            )
            for name, (_, prefix) in TENSOR_NAMES.items()
            if f"{prefix}encoder" in facts
        }
        return cls(parts, tuple(json.loads(facts["class_names"])), facts["real"])

    def check_distinct(self, config: AnnotationConfig) -> None:
        """Raises InputError for two classes whose prototypes coincide."""
        for part in self.parts.values():
            pair = coinciding(part.measurement.prototypes_for(normalize=config.normalize))
            if pair is not None:
                first, second = (repr(self.class_names[k]) for k in pair)
                remedy = f"have one CLIP prototype under {part.identity['model']}, so that no "
                remedy += "image lies between them; give each images of its own, or leave one out"
                raise InputError("real", f"classes {first} and {second}", remedy)

    def report_scale(self, config: AnnotationConfig) -> None:
        """Log the scale and the label that it gives to an average real image, if the scale was
        measured or is unusual; the facts always have both."""
        if config.rule != "projection":
            return
        for name, part in self.parts.items():
            scale = scale_of(part.measurement, config)
            measured = config.scale == "auto"
            if measured or not USUAL_LABELS[0] <= implied_label(scale) <= USUAL_LABELS[1]:
                text = "sharpening of %s: scale %.3g (%s); an average real image would be labelled"
                source = "from the spread of real images" if measured else "as set"
                log.info(f"{text} %.3f", name, scale, source, implied_label(scale))
            for note in hard_label_notes(scale) if measured else ():
                log.warning("%s", note)


def scale_of(measurement: Measurement, config: AnnotationConfig) -> float:
    """The sharpening under these settings."""
    return measurement.scale(config.scale, normalize=config.normalize)


def measure_features(batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Measurement:
    """Measure in two passes over features [n, D] and targets [n]; memory does not grow with n.

    Args:
        batches: can be iterated twice, with the same result.
    Raises:
        ValueError: a class has no features.
    """
    sums, unit_sums = ClassSums(num_classes), ClassSums(num_classes)
    for features, targets in batches:
        sums.add(features, targets)
        unit_sums.add(unit(features), targets)
    means, unit_means = sums.means(), unit_sums.means()
    prototypes, unit_prototypes = means.float(), unit(unit_means).float()
    variance = WeightVariance(prototypes, prototypes)
    unit_variance = WeightVariance(unit_means, unit_prototypes)
    for features, targets in batches:
        variance.add(features, targets)
        unit_variance.add(unit(features), targets)
    return Measurement(prototypes, unit_prototypes, variance.value(), unit_variance.value())


class ClassSums:
    """Sums of the features of each class, in float64, so that order and chunks do not matter."""

    def __init__(self, num_classes: int) -> None:
        self.counts = torch.zeros(num_classes, dtype=torch.int64)
        self._sums: Tensor | None = None

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Args: features [N, D]; targets int64 [N]."""
        if self._sums is None:
            width = features.shape[1]
            self._sums = torch.zeros(len(self.counts), width, dtype=torch.float64)
        self.counts += torch.bincount(targets, minlength=len(self.counts))
        self._sums.index_add_(0, targets, features.double())

    def means(self) -> Tensor:
        """float64 [K, D]. Raises ValueError: a class has no features."""
        if self._sums is None or not self.counts.all():
            raise ValueError(f"class {int(self.counts.argmin())} has no features")
        return self._sums / self.counts[:, None]


class WeightVariance:
    """Variance of the projection weight of real images around the mean of their class.

    Averaged over all images, and the lines to all other classes; 1 / variance is the sharpening
    under which labels are the posterior of two Gaussian classes.

    Args:
        means: of each class, [K, D]; prototypes: [K, D], which span the lines. The same, unless
            prototypes are scaled to length 1.
    """

    def __init__(self, means: Tensor, prototypes: Tensor) -> None:
        self._means = means.double()
        self._prototypes = prototypes.double()
        self._total, self._count, self._min_length_sq = 0.0, 0, math.inf

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Args: features [N, D]; targets int64 [N]."""
        for rows, labels in zip(features.split(ROWS), targets.split(ROWS), strict=True):
            self._add(rows.double(), labels)

    def value(self) -> float:
        """The variance; infinite if two prototypes coincide."""
        return self._total / self._count if self._min_length_sq >= COINCIDE else math.inf

    def _add(self, features: Tensor, targets: Tensor) -> None:
        own_prototypes = self._prototypes[targets]  # [N, D]
        deviations = features - self._means[targets]
        projections = (deviations * own_prototypes).sum(
            1, keepdim=True
        ) - deviations @ self._prototypes.T  # [N, K]
        lengths_sq = squared_distances(own_prototypes, self._prototypes)
        lengths_sq.scatter_(1, targets[:, None], math.inf)  # no line joins a class to itself
        self._min_length_sq = min(self._min_length_sq, float(lengths_sq.min()))
        self._total += float((projections / lengths_sq).square().sum())
        self._count += len(features) * (len(self._prototypes) - 1)


def squared_distances(first: Tensor, second: Tensor) -> Tensor:
    """Squared distances between rows, float64 [N, D], [K, D] -> [N, K]."""
    inner = first @ second.T
    return first.square().sum(1)[:, None] + second.square().sum(1)[None] - 2 * inner


def coinciding(prototypes: Tensor) -> tuple[int, int] | None:
    """Two classes whose prototypes [K, D] coincide, or None."""
    vectors = prototypes.double()
    for index in range(1, len(vectors)):
        close = squared_distances(vectors[index : index + 1], vectors[:index])[0] < COINCIDE
        if close.any():
            return int(close.nonzero()[0]), index
    return None


def unit(vectors: Tensor) -> Tensor:
    """Vectors [..., D] at length 1."""
    return normalize(vectors, dim=-1)
