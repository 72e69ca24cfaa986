"""What a root is written once with: its plan, the pairs that were drawn, its fidelity."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, RootModel

from data.schemas.fields import (
    MOST_GROUPS,
    MOST_IMAGES,
    MOST_PLAN,
    MOST_RECORD,
    MOST_SHARDS,
    ClassIndex,
    Digest,
    FreeForm,
    Text,
)
from data.strict_json import read_object, read_strictly

SCHEMA = 2  # of plan.json; another number is another version's


class Pairs(RootModel[list[tuple[ClassIndex, ClassIndex]]]):
    """`pairs.json`: the pairs that were drawn by similarity."""


class Plan(BaseModel):
    """What `plan.json` must hold; the config inside is checked by its own model."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    digest: Digest
    class_names: list[Text] = Field(min_length=2)
    num_groups: int = Field(ge=0, le=MOST_GROUPS)
    num_shards: int = Field(ge=0, le=MOST_SHARDS)
    images_per_group: int = Field(ge=1, le=MOST_IMAGES)
    config: FreeForm


class Versioned(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    schema_: int = Field(alias="schema")


def read_pairs(content: bytes) -> list[tuple[int, int]]:
    pairs: Any = read_strictly(Pairs, content, what="pairs.json", most=MOST_PLAN)
    return [(first, second) for first, second in pairs]


def read_verdict(content: bytes) -> dict[str, Any]:
    """fidelity.json, which only reports are made of."""
    return read_object(content, what="fidelity.json", most=MOST_RECORD)


def read_plan(content: bytes) -> dict[str, Any]:
    """plan.json; of another schema number only that number is checked, to be told."""
    found = read_strictly(Versioned, content, what="plan.json", most=MOST_PLAN)
    if found["schema"] == SCHEMA:
        read_strictly(Plan, content, what="plan.json", most=MOST_PLAN)
    return found
