"""What became of a shard: its commit record, or why an attempt failed."""

from typing import Any, Self

from pydantic import Field, model_validator

from data.schemas.fields import MOST_GROUPS, MOST_RECORD, Count, Digest, Group, Sha256, Shard, Text
from data.strict_json import Strict, read_strictly


class File(Strict):
    """A published file, as a record describes it."""

    name: str
    sha256: Sha256
    bytes: Count


class IndexedShard(Strict):
    """A shard as an index lists it: what reading, and counting, want of its commit record.

    Names follow from number and hash, so that none can point elsewhere.
    """

    shard: Shard
    tar: str
    sha256: Sha256
    bytes: Count
    features: File
    groups: int = Field(ge=1, lt=MOST_GROUPS)
    first: Group = 0
    seconds: dict[Text, float] = Field({})
    wall_seconds: float = 0.0
    tflop: float | None = None
    attempt: int = Field(1, ge=1)
    prototypes: Sha256 = ""
    discards: Count = 0
    record_bytes: Count = 0

    @model_validator(mode="after")
    def _names_are_its_own(self) -> Self:
        stem = f"shards/{self.shard // 1000:04d}/{self.shard:07d}"
        if self.tar != f"{stem}-{self.sha256[:8]}.tar":
            raise ValueError(f"tar is not {stem}-{self.sha256[:8]}.tar")
        part = self.features
        if part.name != f"{stem}-{part.sha256[:8]}.features.safetensors":
            raise ValueError(f"features is not of shard {self.shard}, or not of its hash")
        return self


class CommitRecord(IndexedShard):
    """`shards/0012/0012345.json`: the shard is done.

    Attributes:
        seconds: by stage; stages overlap, so they may add up to more than `wall_seconds`.
        wall_seconds: worker time. It ends where the shard was made and the one before was
            published; its own publishing overlaps with the next one, whose time it is then.
    """

    spec: Digest
    first: Group
    seconds: dict[Text, float]
    wall_seconds: float
    worker: Text = ""
    versions: dict[Text, Text] = Field({})


class FailureRecord(Strict):
    """`failed/0012/0012345.1.json`: why an attempt failed."""

    shard: Shard
    attempt: int = Field(ge=1)
    error: str
    message: str
    traceback: list[str] = Field([])
    time: float
    group: Group = 0
    worker: Text = ""
    versions: dict[Text, Text] = Field({})


def read_commit_record(content: bytes) -> dict[str, Any]:
    return read_strictly(CommitRecord, content, what="commit record", most=MOST_RECORD)


def read_failure(content: bytes) -> dict[str, Any]:
    return read_strictly(FailureRecord, content, what="failure record", most=MOST_RECORD)
