"""What each JSON file of a root may hold; every reader of one asks here."""

from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    RootModel,
    model_validator,
)

from data.strict_json import Strict, read_object, read_strictly

SCHEMA = 2  # of plan.json; another number is another version's
MIB = 2**20
# Bytes that are parsed at most. Parsed JSON takes up to about thirty times its size in memory.
MOST_GROUP = 4 * MIB  # a hundred images with labels over a thousand classes
MOST_RECORD = MIB
MOST_PLAN = 64 * MIB
MOST_INDEX = 1024 * MIB  # a million shards in one file, as it once was
MOST_PART = 64 * MIB
PER_FOLDER = 1000  # shards; names say which folder, so this is part of the format
MOST_IMAGES = 100  # in a series: positions have two digits
MOST_GROUPS = 10**8  # keys have eight digits
MOST_SHARDS = 10**7  # names have seven
ROUNDING = 1e-3  # of probabilities, which are stored as float32

Count = Annotated[int, Field(ge=0)]
Group = Annotated[int, Field(ge=0, lt=MOST_GROUPS)]
Shard = Annotated[int, Field(ge=0, lt=MOST_SHARDS)]
ClassIndex = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]
Text = Annotated[str, Field(max_length=1000)]
Digest = Annotated[str, Field(pattern=r"^[0-9A-Za-z]{1,64}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FreeForm = dict[str, JsonValue]


def _sums_to_one(row: list[float]) -> list[float]:
    if abs(sum(row) - 1) > ROUNDING:
        raise ValueError(f"sums to {sum(row):.6g}, not 1")
    return row


def _is_a_label(label: list[tuple[int, float]]) -> list[tuple[int, float]]:
    _sums_to_one([probability for _, probability in label])
    if len({target for target, _ in label}) < len(label):
        raise ValueError("names a class twice")
    return label


Mixture = Annotated[list[Share], AfterValidator(_sums_to_one)]
Label = Annotated[list[tuple[ClassIndex, Share]], AfterValidator(_is_a_label)]


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
        _has_length("labels", self.labels, count)
        if "coordinates" in self.model_fields_set:
            _has_length("coordinates", self.coordinates, count)
        if "agreement" in self.model_fields_set:
            _has_length("agreement.weights", self.agreement.weights, count)
            _has_length("agreement.difference", self.agreement.difference, count)
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
        _has_length("weights", self.weights, count)
        _has_length("names", self.names, len(self.classes))
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("classes holds one twice")
        if "mixture" in self.model_fields_set:
            _has_length("mixture", self.mixture, count)
        for row in (*self.mixture, *self.coordinates):
            _has_length("a row of mixture or coordinates", row, len(self.classes))
        return self


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
    """`shards/0012/0012345.json`: the shard is done."""

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


def read_group_record(content: bytes) -> dict[str, Any]:
    """`KEY.json` of a shard. Raises ValueError, as all here: `what: field: problem`."""
    return read_strictly(GroupRecord, content, what="record of a series", most=MOST_GROUP)


def read_commit_record(content: bytes) -> dict[str, Any]:
    return read_strictly(CommitRecord, content, what="commit record", most=MOST_RECORD)


def read_failure(content: bytes) -> dict[str, Any]:
    return read_strictly(FailureRecord, content, what="failure record", most=MOST_RECORD)


def read_index(content: bytes) -> dict[str, Any]:
    return read_strictly(Index, content, what="index", most=MOST_INDEX)


def read_part(content: bytes) -> dict[str, Any]:
    return read_strictly(Part, content, what="part of an index", most=MOST_PART)


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


def _has_length(name: str, values: list[Any], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries, not {count}")
