"""The files of a label set, strictly read: set.json, and one of labels a shard."""

from typing import Annotated, Any, Literal

from pydantic import Field

from data.fingerprint import canonical_json, fingerprint
from data.schemas import MIB, MOST_RECORD, Count, FreeForm, Group, Labels, Sha256, Shard
from data.strict_json import Strict, read_strictly

Record = dict[str, Any]
SET_SCHEMA = 1
# Bytes that are read at most; 500 series with labels over a thousand classes are as many.
MOST_LABELS = 128 * MIB
# The parts of KEY.json that are labels; another set has others for the same images.
PARTS = tuple(Labels.model_fields)
STEM = r"labels/[0-9a-f]{64}/[0-9]{4}/[0-9]{7}-[0-9a-f]{8}"


class FeaturesFile(Strict):
    """The features that a set stores beside a shard's labels."""

    name: Annotated[str, Field(pattern=rf"^{STEM}\.features\.safetensors$")]
    sha256: Sha256
    bytes: Count


class SeriesLabels(Labels):
    """What a set says of one series."""

    group: Group


class ShardLabels(Strict):
    """Labels of one shard's images, and which images those are.

    Attributes:
        spec: binds the record to its set and shard.
        images: sha256 of the tar that was labelled.
    """

    spec: Sha256
    shard: Shard
    images: Sha256
    groups: Annotated[list[SeriesLabels], Field(min_length=1)]
    features: FeaturesFile | None = None


class SetRecord(Strict):
    """set.json: how the labels of a set are made.

    Attributes:
        plan: digest of the root's plan.
        encoders: each CLIP by name and file hashes.
        features: where they come from: root, images, or the digest of another set.
        batch: images in one forward pass, where they come from images.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    digest: Sha256
    plan: Sha256
    annotation: FreeForm
    encoders: FreeForm
    features: Annotated[str, Field(pattern=r"^(root|images|[0-9a-f]{64})$")]
    batch: Annotated[int, Field(ge=1)]


def read_shard_labels(content: bytes) -> Record:
    """Raises ValueError that names the field at fault."""
    return read_strictly(ShardLabels, content, what="shard labels", most=MOST_LABELS)


def read_set_record(content: bytes) -> Record:
    """Raises ValueError that names the field at fault."""
    return read_strictly(SetRecord, content, what="label set", most=MOST_RECORD)


def write_record(record: Record) -> bytes:
    return canonical_json(record).encode()


def set_digest(plan: str, annotation: Record, encoders: Record, batch: int) -> str:
    """The identity of a label set: the images' plan, and all that decides their labels."""
    return fingerprint([plan, annotation, encoders, batch])


def with_labels(record: Record, labels: Record) -> Record:
    """A KEY.json with other labels."""
    return {key: value for key, value in record.items() if key not in PARTS} | labels
