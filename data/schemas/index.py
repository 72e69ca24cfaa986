"""An index and its parts: the shards that a training run pins."""

from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from data.schemas.fields import (
    MOST_INDEX,
    MOST_PART,
    MOST_SHARDS,
    PER_FOLDER,
    Count,
    Digest,
    Sha256,
    Text,
)
from data.schemas.shard import IndexedShard
from data.strict_json import Strict, read_strictly


class PartSums(Strict):
    """What progress adds up over the shards of a part, so that it need not be read for that.

    Attributes:
        untold: shards that do not say how many TFLOP they took.
        prototypes: how many shards name which, by SHA-256; empty where they name none.
    """

    groups: Count
    wall_seconds: float
    tflop: float
    untold: Count
    seconds: dict[Text, float]
    prototypes: dict[Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")], Count]


class IndexedPart(Strict):
    """A part of an index: the shards of one folder, in a file named by folder and hash.

    Attributes:
        shards: how many it lists.
        records: of the numbers, sizes and discards of their commit records; a listing with the
            same digest holds nothing that the part does not know.
        files: likewise of their groups and the names and sizes of their files.
    """

    folder: int = Field(ge=0, lt=MOST_SHARDS // PER_FOLDER)
    sha256: Sha256
    bytes: Count
    shards: int = Field(ge=1, le=PER_FOLDER)
    records: Sha256
    files: Sha256
    sums: PartSums


class Index(Strict):
    """`index/N.json`: the shards that a training run pins, ascending.

    Parts name them a folder at a time; indices of earlier versions list the shards themselves.
    """

    plan: Digest
    parts: list[IndexedPart] = Field([])
    shards: list[IndexedShard] = Field([])

    @model_validator(mode="after")
    def _ascend(self) -> Self:
        if len({"parts", "shards"} & self.model_fields_set) != 1:
            raise ValueError("must have either parts or shards")
        if not all(a.shard < b.shard for a, b in pairwise(self.shards)):
            raise ValueError("shards do not ascend")
        if not all(a.folder < b.folder for a, b in pairwise(self.parts)):
            raise ValueError("parts do not ascend")
        return self


class Part(Strict):
    """`index/parts/0012-SHA8.json`: the shards of one folder, ascending."""

    plan: Digest
    folder: int
    shards: list[IndexedShard]

    @model_validator(mode="after")
    def _ascend(self) -> Self:
        if not all(a.shard < b.shard for a, b in pairwise(self.shards)):
            raise ValueError("shards do not ascend")
        if any(entry.shard // PER_FOLDER != self.folder for entry in self.shards):
            raise ValueError("lists a shard of another folder")
        return self


def read_index(content: bytes) -> dict[str, Any]:
    return read_strictly(Index, content, what="index", most=MOST_INDEX)


def read_part(content: bytes) -> dict[str, Any]:
    return read_strictly(Part, content, what="part of an index", most=MOST_PART)
