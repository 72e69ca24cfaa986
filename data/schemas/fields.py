"""Limits of what is read, and the kinds of fields that several JSON files have."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, JsonValue

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


def has_length(name: str, values: list[Any], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries, not {count}")
