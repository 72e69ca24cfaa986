"""`KEY.json`: one series of images, its mixtures, weights and labels."""

from typing import Any, Self

from pydantic import Field, model_validator

from data.schemas.fields import (
    MOST_GROUP,
    MOST_IMAGES,
    ClassIndex,
    FreeForm,
    Group,
    Label,
    Mixture,
    Share,
    Text,
    has_length,
)
from data.strict_json import Strict, read_strictly


class Agreement(Strict):
    """What a second encoder says of the same images, and how far it is from the first."""

    weights: list[float]
    difference: list[float]


class Labels(Strict):
    """The parts of a series' record that an annotation writes; one entry an image."""

    weights: list[float] = Field(min_length=1, max_length=MOST_IMAGES)
    labels: list[Label]
    coordinates: list[list[float]] = Field([])
    agreement: Agreement = Agreement(weights=[], difference=[])

    @model_validator(mode="after")
    def _one_an_image(self) -> Self:
        count = len(self.weights)
        has_length("labels", self.labels, count)
        if "coordinates" in self.model_fields_set:
            has_length("coordinates", self.coordinates, count)
        if "agreement" in self.model_fields_set:
            has_length("agreement.weights", self.agreement.weights, count)
            has_length("agreement.difference", self.agreement.difference, count)
        return self


class GroupRecord(Labels):
    """`KEY.json`: one series of images."""

    group: Group
    classes: list[ClassIndex] = Field(min_length=2, max_length=16)
    names: list[Text]
    seed: int = Field(ge=0, lt=2**64)
    alphas: list[Share]
    mixture: list[Mixture] = Field([])
    noise: FreeForm

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        count = len(self.alphas)
        has_length("weights", self.weights, count)
        has_length("names", self.names, len(self.classes))
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("classes holds one twice")
        if "mixture" in self.model_fields_set:
            has_length("mixture", self.mixture, count)
        for row in (*self.mixture, *self.coordinates):
            has_length("a row of mixture or coordinates", row, len(self.classes))
        return self


def read_group_record(content: bytes) -> dict[str, Any]:
    """`KEY.json` of a shard. Raises ValueError, as all here: `what: field: problem`."""
    return read_strictly(GroupRecord, content, what="record of a series", most=MOST_GROUP)
