"""The files of a root: their names, typed models and strict readers.

    plan.json  prototypes.safetensors  extensions/N.json
    shards/0012/0012345.json  0012345-SHA8.tar  0012345-SHA8.features.safetensors
    failed/0012/0012345.N.json  discarded/0012/0012345.N.json  leases/NAME.json
    index/N.json  audit/N.json  flags/N.json
    labels/DIGEST/set.json  labels/DIGEST/0012/0012345.json

A model's `read` raises ValueError (`what: field: problem`) for a damaged file, and InputError for
one that a newer version of semix wrote: that file is intact, and must be left alone.
"""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from semix.data.errors import InputError
from semix.data.fingerprint import canonical_json, fingerprint
from semix.data.model_identity import CHECKED, ModelIdentities
from semix.data.strict_json import Strict, read_strictly

PLAN, PROTOTYPES = "plan.json", "prototypes.safetensors"
SHARDS, FAILED, DISCARDED = "shards", "failed", "discarded"
INDICES, AUDITS, EXTENSIONS, SETS = "index", "audit", "extensions", "labels"
EXCLUSIONS = "flags"  # set by people; those of audits are in their own files
PER_FOLDER = 1000  # shards; names depend on it, so it is part of the format
MIB = 2**20
MAX_IMAGES = 100  # in a series, because positions have two digits
MAX_GROUPS = 10**8  # keys have eight digits
MAX_SHARDS = 10**7  # names of shards have seven digits
MAX_SERIES = 10**6  # in a shard; far more than in practice
MAX_MIXED = 16  # classes in a series
MAKERS = ("diffusers", "torch")  # libraries by which an older plan is recognised
MAX_FEATURES = 4096 * MIB  # enough for 100,000 series of eight images in one shard
ROUNDING = 1e-3  # of probabilities, which are stored as float32

Count = Annotated[int, Field(ge=0, lt=2**63)]  # fits int64
Group = Annotated[int, Field(ge=0, lt=MAX_GROUPS)]
Number = Annotated[int, Field(ge=0, lt=MAX_SHARDS)]  # of a shard
ClassIndex = Annotated[int, Field(ge=0, lt=2**31)]
SeriesCount = Annotated[int, Field(ge=1, le=MAX_GROUPS)]
Fraction = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]
Text = Annotated[str, Field(max_length=1000)]
Digest = Annotated[str, Field(pattern=r"^[0-9A-Za-z]{1,64}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MaybeSha256 = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
FreeForm = dict[str, Any]  # checked by the code that reads it
PairWeighting = Literal["confusion", "calibration"]  # by what a run says of real images
ImageFormat = Literal["webp", "png", "jpg"]  # of stored images; their extensions
ShardStage = Literal["noise", "generate", "encode", "annotate", "write", "stall"]
STAGES: tuple[ShardStage, ...] = get_args(ShardStage)


def shard_stem(shard: int, folder: str = SHARDS) -> str:
    """Name of a shard's files, without extension: `shards/0012/0012345`."""
    return f"{folder}/{shard // PER_FOLDER:04d}/{shard:07d}"


def record_name(shard: int, folder: str = SHARDS) -> str:
    """Name of a shard's commit record or, in the folder of a label set, of its labels."""
    return f"{shard_stem(shard, folder)}.json"


def tar_name(shard: int, sha256: str) -> str:
    return f"{shard_stem(shard)}-{sha256[:8]}.tar"


def features_name(shard: int, sha256: str, folder: str = SHARDS) -> str:
    return f"{shard_stem(shard, folder)}-{sha256[:8]}.features.safetensors"


def attempt_name(shard: int, number: int, folder: str = FAILED) -> str:
    """Name of the record of a failed attempt, or of a tombstone."""
    return f"{shard_stem(shard, folder)}.{number}.json"


def spec_digest(plan_digest: str, shard: int) -> str:
    """Digest of a plan or label set and a shard; a record counts only if it has this digest."""
    return fingerprint([plan_digest, shard])


class StoredFile(Strict):
    """Base of the models that are stored as files.

    Attributes:
        WHAT: its name in messages; MAX_BYTES: size above which it is not parsed.
        SCHEMA: version of the format, stored from 2 on. It grows with every added field, so that
            an older version of semix can tell a newer file from a damaged one.
    """

    WHAT: ClassVar[str]
    MAX_BYTES: ClassVar[int] = MIB  # JSON takes thirty times its size in memory
    SCHEMA: ClassVar[int] = 1

    schema_: int = Field(1, alias="schema", ge=1, exclude=True)

    @classmethod
    def read(cls, content: bytes, *, where: str = "") -> Self:
        """Parse `content`.

        Args:
            where: path or URL of the file, for the error about a newer version.
        Raises:
            ValueError: `what: field: problem`; InputError: a newer version of semix wrote it.
        """
        try:
            stored = read_strictly(cls, content, what=cls.WHAT, max_bytes=cls.MAX_BYTES)
        except ValueError:
            if len(content) <= cls.MAX_BYTES:
                refuse_newer(cls, content, where=where)
            raise
        _refuse_newer(cls, stored.schema_, where)
        return stored

    def written(self, *, indent: int | None = None) -> bytes:
        """Its JSON text with sorted keys: canonical, or with `indent` for a person to read."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        values |= {"schema": self.SCHEMA} if self.SCHEMA > 1 else {}
        text = canonical_json(values)
        return (json.dumps(values, indent=indent, sort_keys=True) if indent else text).encode()


class File(Strict):
    """A record's description of a published file."""

    name: str
    sha256: Sha256
    bytes: Count

    @property
    def max_bytes(self) -> int:
        """Number of bytes to read at most, even if the record says more."""
        return min(self.bytes, MAX_FEATURES)


@with_config(CHECKED)
class BakedFrom(TypedDict):
    """The plan and the label set whose labels were baked in."""

    plan: Digest
    labels: Sha256 | None


class SeriesByRun(Strict):
    """The series per pair that the classifiers of a training run determined.

    Attributes:
        run: its folder; digest: of its settings and data; by: how it weights pairs.
        images: number of real images, set aside from its training, that it judged.
        series: first class, second class and number of series, of each pair that has any.
    """

    run: Text
    digest: Digest
    by: PairWeighting
    images: Count
    series: list[tuple[ClassIndex, ClassIndex, SeriesCount]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        pairs = [(first, second) for first, second, _ in self.series]
        if not all(first < second for first, second in pairs):
            raise ValueError("series: the classes of a pair do not ascend")
        if not all(pair < following for pair, following in pairwise(pairs)):
            raise ValueError("series: pairs do not ascend")
        return self

    def check(self, groups: int, classes: int) -> None:
        """Raise ValueError unless these are so many series of so many classes."""
        if sum(count for _, _, count in self.series) != groups:
            raise ValueError(f"by_run: the series of all pairs are not {groups}")
        if any(second >= classes for _, second, _ in self.series):
            raise ValueError(f"by_run: a pair is not of the {classes} classes")


class Plan(BaseModel):
    """`plan.json`, written once: the values that readers need, and the config of the build.

    Attributes:
        digest: identity of the settings that determine the bytes; see `semix.pipeline.plan`.
        num_groups, num_shards: as planned, without extensions.
        classes_per_group: how many classes a series mixes.
        normalize: whether labels come from features of unit length.
        pairs: the pairs of classes that were drawn by similarity, ascending; None if the pairs
            follow from the config.
        by_run: the series per pair that a run determined; None if the config says how many.
        config: all settings, which have their own model.
        baked_from: plan and label set of a root whose labels were baked in.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)
    SCHEMA: ClassVar[int] = 4
    MAX_BYTES: ClassVar[int] = 64 * MIB

    schema_: int = Field(alias="schema")
    digest: Digest
    class_names: list[Text] = Field(min_length=2)
    num_groups: int = Field(ge=0, le=MAX_GROUPS)
    num_shards: int = Field(ge=0, le=MAX_SHARDS)
    groups_per_pair: int = Field(ge=1, le=MAX_GROUPS)
    groups_per_shard: int = Field(ge=1, le=MAX_SERIES)
    images_per_group: int = Field(ge=1, le=MAX_IMAGES)
    classes_per_group: int = Field(ge=2, le=MAX_MIXED)
    normalize: bool
    pairs: list[tuple[ClassIndex, ClassIndex]] | None = None
    by_run: SeriesByRun | None = None
    config: FreeForm
    models: ModelIdentities
    versions: dict[Text, Text] = Field({})
    baked_from: BakedFrom | None = None

    @property
    def num_pairs(self) -> int:
        """How many sets of classes are mixed."""
        return max(1, self.num_groups // self.groups_per_pair)

    @property
    def marked(self) -> bool:
        """Whether each image file says that it is generated. A plan from before there was a mark
        does not mention it, and its images have none."""
        shards = self.config.get("shards")
        return isinstance(shards, dict) and shards.get("mark") is True

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        pairs, classes = self.pairs or [], len(self.class_names)
        if not all(first < second < classes for first, second in pairs):
            raise ValueError(f"pairs: one does not ascend, or is not of the {classes} classes")
        if not all(pair < following for pair, following in pairwise(pairs)):
            raise ValueError("pairs do not ascend")
        if self.by_run is not None:
            self.by_run.check(self.num_groups, classes)
        return self

    @classmethod
    def read(cls, content: bytes, *, where: str) -> Self:
        """Raises ValueError for damage, InputError for the plan of another version."""
        versioned = read_strictly(_Versioned, content, what=PLAN, max_bytes=cls.MAX_BYTES)
        if versioned.schema_ != cls.SCHEMA:
            made_by = versioned.model_extra and versioned.model_extra.get("versions")
            remedy = f"{_another_version(made_by)} wrote it, this one reads {cls.SCHEMA}"
            raise InputError(f"{where} schema", versioned.schema_, f"{remedy}; use that version")
        return read_strictly(cls, content, what=PLAN, max_bytes=cls.MAX_BYTES)

    def written(self) -> bytes:
        values = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return json.dumps(values, indent=1, ensure_ascii=False).encode()


def _another_version(libraries: Any) -> str:
    """`another version of semix, with torch 2.11.0`: what a plan says about its maker."""
    known = libraries if isinstance(libraries, dict) else {}
    text = f"semix {known['semix']!s:.20}" if "semix" in known else "another version of semix"
    others = [f"{n!s:.20} {v!s:.20}" for n, v in sorted(known.items()) if n in MAKERS]
    return f"{text}, with {' and '.join(others)}," if others else text


class Extension(StoredFile):
    """`extensions/N.json`: groups that were added after the last.

    Attributes:
        groups_per_pair: series of every pair so far, without those that runs determined.
        by_run: the series that it adds to each pair, if a run determined them.
    """

    WHAT = "extension"
    MAX_BYTES = 64 * MIB  # enough for all pairs of a thousand classes

    plan: Digest
    groups_per_pair: int = Field(ge=1)
    first_group: Group
    first_shard: Number
    groups: int = Field(ge=1, le=MAX_GROUPS)
    shards: int = Field(ge=1, le=MAX_SHARDS)
    by_run: SeriesByRun | None = None


class LeftOut(Strict):
    """A series that could not be stored, and why."""

    group: Group
    reason: Text


class ShardEntry(StoredFile):
    """A shard in an index: the fields of its commit record that a reader pins.

    File names follow from number and hash, so that none can point to another file.

    Attributes:
        first: the first group planned for it; groups: the number of series in it.
        left_out: planned series that came out flat or not finite.
    """

    WHAT = "entry of an index"

    shard: Number
    tar: str
    sha256: Sha256
    bytes: Count
    features: File
    groups: int = Field(ge=1, le=MAX_SERIES)
    first: Group
    left_out: list[LeftOut] = Field([])

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.tar != tar_name(self.shard, self.sha256):
            raise ValueError(f"tar is not {tar_name(self.shard, self.sha256)}")
        if self.features.name != features_name(self.shard, self.features.sha256):
            raise ValueError(f"features is not of shard {self.shard}, or not of its hash")
        return self

    @model_validator(mode="after")
    def _check_left_out(self) -> Self:
        if self.left_out and len(self.group_numbers) != self.groups:
            raise ValueError(f"left_out is not of the series from {self.first} on, each once")
        return self

    @property
    def group_numbers(self) -> list[int]:
        """Group numbers of the series in the shard, in order."""
        missing = {series.group for series in self.left_out}
        planned = range(self.first, self.first + self.groups + len(self.left_out))
        return [group for group in planned if group not in missing]


class CommitRecord(ShardEntry):
    """`shards/0012/0012345.json`, written last: the shard is done.

    Attributes:
        spec: binds the record to its plan and shard.
        seconds: by stage; stages overlap, so they may add up to more than `wall_seconds`.
        wall_seconds: worker time; publishing a shard counts in the next one, which it overlaps.
        prototypes: SHA-256 of the file that its labels were made with; empty if not recorded.
    """

    WHAT = "commit record"

    spec: Digest
    seconds: dict[ShardStage, float]
    wall_seconds: float
    attempt: int = Field(ge=1, lt=2**63)
    prototypes: MaybeSha256 = ""
    worker: Text = ""
    versions: dict[Text, Text] = Field({})

    @property
    def entry(self) -> ShardEntry:
        """What an index pins of it."""
        values = {name: getattr(self, name) for name in ShardEntry.model_fields}
        return ShardEntry.model_construct(**values)


class Failure(StoredFile):
    """`failed/0012/0012345.1.json`: why an attempt failed."""

    WHAT = "failure record"

    shard: Number
    attempt: int = Field(ge=1)
    error: str
    message: str
    traceback: list[str] = Field([])
    time: float
    group: Group | None = None
    worker: Text = ""
    versions: dict[Text, Text] = Field({})


class EncoderAgreement(Strict):
    """Weights of the same images by a second encoder, and their difference from the first ones."""

    weights: list[float]
    difference: list[float]


def _check_sums_to_one(row: list[float]) -> list[float]:
    if abs(sum(row) - 1) > ROUNDING:
        raise ValueError(f"sums to {sum(row):.6g}, not 1")
    return row


def _check_label(label: list[tuple[int, float]]) -> list[tuple[int, float]]:
    _check_sums_to_one([probability for _, probability in label])
    if len({target for target, _ in label}) < len(label):
        raise ValueError("names a class twice")
    return label


Mixture = Annotated[list[Fraction], AfterValidator(_check_sums_to_one)]
Label = Annotated[list[tuple[ClassIndex, Fraction]], AfterValidator(_check_label)]


class Labels(StoredFile):
    """The fields of a series' record that an annotation writes; lists have one entry per image.

    Attributes:
        weights: raw CLIP weights of the first class; labels: (class, probability), sparse.
        coordinates: raw weights of all classes of the series, if there are more than two.
        agreement: set if there is a second encoder.
    """

    WHAT = "labels of a series"

    weights: list[float] = Field(min_length=1, max_length=MAX_IMAGES)
    labels: list[Label]
    coordinates: list[list[float]] | None = None
    agreement: EncoderAgreement | None = None

    def label_fields(self) -> dict[str, Any]:
        """The fields of labels, by name."""
        names = Labels.model_fields.keys() - StoredFile.model_fields.keys()
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        count = len(self.weights)
        check_length("labels", self.labels, count)
        check_length("coordinates", self.coordinates, count)
        if self.agreement is not None:
            check_length("agreement.weights", self.agreement.weights, count)
            check_length("agreement.difference", self.agreement.difference, count)
        return self


class SeriesRecord(Labels):
    """`KEY.json`: one series of images.

    Attributes:
        classes: the mixed classes; names: their names.
        alphas: conditioning weights of the first class; mixture: those of all, if more than two.
        noise: how it was selected: `strategy`, `stability` and more.
        synthetic: whether its images are marked as generated; older roots do not say it.
    """

    WHAT = "record of a series"
    MAX_BYTES = 4 * MIB  # enough for a hundred images with labels over a thousand classes

    group: Group
    classes: list[ClassIndex] = Field(min_length=2, max_length=MAX_MIXED)
    names: list[Text]
    seed: int = Field(ge=0, lt=2**64)
    alphas: list[Fraction]
    mixture: list[Mixture] | None = None
    noise: FreeForm
    synthetic: bool = False

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        count = len(self.alphas)
        check_length("weights", self.weights, count)
        check_length("names", self.names, len(self.classes))
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("classes holds one twice")
        check_length("mixture", self.mixture, count)
        for row in (*(self.mixture or ()), *(self.coordinates or ())):
            check_length("a row of mixture or coordinates", row, len(self.classes))
        return self

    @property
    def mixtures(self) -> list[list[float]]:
        """Conditioning weights of the classes in each image, [A][k]."""
        return self.mixture or [[alpha, 1 - alpha] for alpha in self.alphas]

    @property
    def stability(self) -> float | None:
        """Inversion stability of the noise; None where it was not scored."""
        score = self.noise.get("stability")
        return score if isinstance(score, float) else None

    @classmethod
    def from_labels(cls, labels: Labels, **values: Any) -> Self:
        """A record from labels and all other fields. Raises ValueError if they do not fit."""
        return cls(**values, **labels.label_fields())

    def with_labels(self, labels: Labels) -> Self:
        """The record of the same series with other labels."""
        names = type(self).model_fields.keys() - Labels.model_fields.keys()
        return self.from_labels(labels, **{name: getattr(self, name) for name in names})


def check_length(name: str, values: Sequence[Any] | None, count: int) -> None:
    if values is not None and len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries, not {count}")


class SeriesLabels(Labels):
    """The labels of one series in a label set."""

    group: Group


class ShardLabels(StoredFile):
    """`labels/DIGEST/0012/0012345.json`: labels of one shard, and the hash of its images.

    Attributes:
        spec: binds the record to its set and shard.
        images: sha256 of the labelled tar.
        features: file that the set stores beside the labels.
    """

    WHAT = "shard labels"
    MAX_BYTES = 128 * MIB  # enough for 500 series with labels over a thousand classes

    spec: Sha256
    shard: Number
    images: Sha256
    groups: Annotated[list[SeriesLabels], Field(min_length=1)]
    features: File | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        stem = r"labels/[0-9a-f]{64}/[0-9]{4}/[0-9]{7}-[0-9a-f]{8}"
        name = self.features.name if self.features else ""
        if name and not re.fullmatch(rf"{stem}\.features\.safetensors", name):
            raise ValueError(f"features is not in a label set: {name!a}")
        return self


class LabelSetRecord(StoredFile):
    """`labels/DIGEST/set.json`: how the labels of a set are made.

    Attributes:
        plan: digest of the root's plan.
        encoders: each CLIP model by name and file hashes.
        features: their source: root, images, or the digest of another set.
        batch: images in one forward pass, if features are computed from images.
    """

    WHAT = "label set"

    digest: Sha256
    plan: Digest
    annotation: FreeForm
    encoders: FreeForm
    features: Annotated[str, Field(pattern=r"^(root|images|[0-9a-f]{64})$")]
    batch: Annotated[int, Field(ge=1)]


# backwards, not_monotone: how the weight follows alpha; end_points: an unmixed image is nearest to
# the prototype of another class; duplicate: an image resembles one of an earlier series; still:
# neighbours do not differ; degenerate: flat, black, white, or features that are not finite.
Flag = Literal[
    "backwards", "not_monotone", "end_points", "duplicate", "still", "degenerate", "concept"
]
FLAGS: tuple[Flag, ...] = get_args(Flag)


class SeriesFlags(StoredFile):
    """`audit/N.json`: group numbers by flag, ascending, for the series of one index.

    Another version of semix may have other flags; a flag that was not audited is missing.

    Attributes:
        index: name of the index that was audited.
        digest: of the index, because a copied root may use the same name for another one.
        labels: digest of the label set that was audited; None for the labels in the shards.
    """

    WHAT = "audit"
    MAX_BYTES = 1024 * MIB

    index: str = Field(pattern=r"^index/[0-9]{1,9}\.json$")
    digest: Sha256
    labels: Sha256 | None
    flags: dict[Text, list[Group]]


class ExclusionFlags(StoredFile):
    """`flags/N.json`: series that somebody excluded, or took back; later files win.

    Attributes:
        time: UNIX seconds, for people.
    """

    WHAT = "exclusion flags"
    MAX_BYTES = 64 * MIB

    plan: Digest
    excluded: list[Group]
    restored: list[Group]
    time: float

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if both := set(self.excluded) & set(self.restored):
            raise ValueError(f"group {min(both)} is both excluded and restored")
        return self


class Tombstone(StoredFile):
    """`discarded/0012/0012345.N.json`: why a shard was discarded, and the text of its record."""

    WHAT = "tombstone"

    shard: Number
    why: str
    record: str


class Lease(StoredFile):
    """`leases/NAME.json`: the machine and process that hold the lease."""

    WHAT = "lease"
    MAX_BYTES = 4096

    host: str
    pid: int


class _Versioned(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    schema_: int = Field(1, alias="schema")


def refuse_newer(kind: type[StoredFile], content: bytes, *, where: str = "") -> None:
    """Raises InputError if a newer version of semix, which may add fields, wrote `content`."""
    try:
        schema = _Versioned.model_validate_json(content).schema_
    except ValueError:
        return
    _refuse_newer(kind, schema, where)


def _refuse_newer(kind: type[StoredFile], schema: int, where: str) -> None:
    if schema > kind.SCHEMA:
        remedy = f"a newer version of semix wrote it, this one reads {kind.SCHEMA}"
        raise InputError(f"{where or kind.WHAT} schema", schema, f"{remedy}; use that version")
