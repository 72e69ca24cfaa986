"""What labels need of the real images: prototypes and the spread of the weight."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from pipeline.annotation.sealed import Facts
from pipeline.annotation.statistics import ClassSums, WeightVariance, unit

SCALE_RANGE = (1.0, 20.0)
Names = tuple[str, str]  # of the two tensors in a file
NAMES: Names = ("prototypes", "unit")


@dataclass(frozen=True)
class Measurement:
    """The real images of a training split as one encoder sees them; any rule can use it.

    Attributes:
        prototypes: mean feature of each class, float32 [K, D].
        unit: mean unit feature of each class at length 1, float32 [K, D].
        variance, unit_variance: of the weight of real images in their class, on the lines
            between either.
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
        least, most = SCALE_RANGE
        return 1 / min(max(variance, 1 / most), 1 / least)  # none at all, with one image a class

    def chosen(self, *, normalize: bool) -> Tensor:
        """The prototypes that an annotation with or without `normalize` uses."""
        return self.unit if normalize else self.prototypes

    def tensors(self, names: Names = NAMES) -> dict[str, Tensor]:
        return {names[0]: self.prototypes, names[1]: self.unit}

    def facts(self, prefix: str = "") -> Facts:
        return {
            f"{prefix}weight_variance": repr(self.variance),
            f"{prefix}unit_weight_variance": repr(self.unit_variance),
        }

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], facts: Facts, *, names: Names = NAMES, prefix: str = ""
    ) -> Self:
        """From what `tensors` and `facts` gave. Raises ValueError: some of it is not there."""
        try:
            return cls(
                prototypes=tensors[names[0]],
                unit=tensors[names[1]],
                variance=float(facts[f"{prefix}weight_variance"]),
                unit_variance=float(facts[f"{prefix}unit_weight_variance"]),
            )
        except KeyError as error:
            raise ValueError(f"holds no {error}") from None


def implied_label(scale: float) -> float:
    """The probability of the own class that a sharpening gives to an average real image, whose
    weight is 1."""
    return 1 / (1 + math.exp(-scale / 2))


def measured(batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Measurement:
    """Two passes over features [n, D] and targets [n]; memory does not grow with their number.

    Args:
        batches: can be walked twice, and gives the same both times.
    Raises:
        ValueError: a class has no features.
    """
    raw, short = ClassSums(num_classes), ClassSums(num_classes)
    for features, targets in batches:
        raw.add(features, targets)
        short.add(unit(features), targets)
    means, unit_means = raw.means(), short.means()
    prototypes, unit_prototypes = means.float(), unit(unit_means).float()
    spread = WeightVariance(prototypes, prototypes)
    unit_spread = WeightVariance(unit_means, unit_prototypes)
    for features, targets in batches:
        spread.add(features, targets)
        unit_spread.add(unit(features), targets)
    return Measurement(prototypes, unit_prototypes, spread.value(), unit_spread.value())
