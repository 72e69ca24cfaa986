"""What is fuzzed: each reader with good inputs to start from, and what it may answer."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data.errors import InputError
from data.images import decode_image, encode_image
from data.schemas import (
    read_commit_record,
    read_failure,
    read_group_record,
    read_index,
    read_part,
    read_plan,
)
from data.shards import read_tar, scan_tar
from tests.handmade import make_plan, pixels, record, sample, tar_of

IMAGE = "not a complete WebP, PNG or JPEG image: ."
TAR = (
    r"damaged tar: |does not belong in a shard|is out of order$|group \d{8} has |"
    rf"\d{{8}}\.json: record of a series: .|{IMAGE}"
)
HASH = "ab" * 32
PART = {"sha256": HASH, "bytes": 7}
STEM = "shards/0000/0000003-abababab"
SHARD = {
    "shard": 3,
    "tar": f"{STEM}.tar",
    **PART,
    "features": {"name": f"{STEM}.features.safetensors", **PART},
    "groups": 64,
    "first": 192,
}
COMMIT = SHARD | {"spec": HASH, "seconds": {"generate": 1.5}, "wall_seconds": 2.5, "tflop": None}
ROWS = {"plan": HASH, "folder": 0, "shards": [SHARD]}
SUMS = {"groups": 64, "wall_seconds": 2.5, "tflop": 0.0, "untold": 1, "seconds": {"write": 0.5}}
PARTS = [
    {"folder": 0, "sha256": HASH, "bytes": 7, "shards": 1, "records": HASH, "files": HASH}
    | {"sums": SUMS | {"prototypes": {"": 1}}}
]
FAILURE = {"shard": 3, "attempt": 1, "error": "E", "message": "m", "traceback": [""], "time": 1.5}
LABELS = {"agreement": {"weights": [0.5, 1.0], "difference": [0.0, 0.5]}}
SIMPLEX = {"mixture": [[0.5, 0.5], [1, 0]], "coordinates": [[0.5, 0.5], [1.5, -0.5]]}


@dataclass(frozen=True)
class Target:
    """A reader of bytes.

    Attributes:
        read: raises AssertionError if what it returns is not what it promises.
        refusal: pattern of the messages of the errors it may raise.
        seeds: inputs that it reads.
    """

    read: Callable[[bytes], object]
    refusal: re.Pattern[str]
    seeds: list[bytes]


def attempt(target: Target, content: bytes) -> bool:
    """Whether it was read; any answer but that or a named error comes out as it is."""
    try:
        target.read(content)
    except ValueError as error:
        if type(error) in (ValueError, InputError) and target.refusal.search(str(error)):
            return False
        raise
    return True


def read_shard_bytes(content: bytes) -> None:
    places = None
    try:
        places = list(scan_tar(io.BytesIO(content)))
    finally:
        samples = list(read_tar(io.BytesIO(content)))
    assert places is not None, "read_tar accepts what scan_tar refuses"
    assert len(places) == len(samples)
    for found, place in zip(samples, places, strict=True):
        spans = [content[span.offset : span.offset + span.size] for span in place.images]
        assert (found.images, found.record["group"]) == (spans, place.group)
        assert len(spans) == len(found.record["alphas"]) == len(found.record["labels"])
        for image in found.images:
            read_image(image)


def read_image(content: bytes) -> None:
    found = decode_image(content)
    assert found.dtype == np.uint8
    assert found.shape[2:] == (3,)
    assert found.shape[0] * found.shape[1] <= 4096 * 4096


def _records(value: object) -> list[bytes]:
    return [json.dumps(value).encode()]


def _saved(mode: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(0, 1, 24)[0]).convert(mode).save(buffer, **options)
    return buffer.getvalue()


def _images() -> list[bytes]:
    return [
        *(encode_image(pixels(0, 1, 16)[0], extension) for extension in ("webp", "png", "jpg")),
        _saved("RGB", format="WEBP", quality=60, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"),
        _saved("RGBA", format="WEBP", quality=60),
        _saved("P", format="PNG"),
        _saved("RGBA", format="PNG"),
        _saved("RGB", format="JPEG", progressive=True, icc_profile=bytes(200)),
        _saved("CMYK", format="JPEG"),
    ]


def targets() -> dict[str, Target]:
    """All of them by name."""
    formats = ("webp", "png", "jpg")
    shards = [tar_of(*(sample(g, 3, extension=e) for g in range(2))) for e in formats]
    groups = [json.dumps(record(3) | more).encode() for more in ({}, LABELS, SIMPLEX)]
    found = {
        "shard": (read_shard_bytes, TAR, shards),
        "image": (read_image, IMAGE, _images()),
        "group": (read_group_record, "^record of a series: .", groups),
        "commit": (read_commit_record, "^commit record: .", _records(COMMIT)),
        "failure": (read_failure, "^failure record: .", _records(FAILURE)),
        "index": (read_index, "^index: .", _records({"plan": HASH, "parts": PARTS})),
        "inline": (read_index, "^index: .", _records({"plan": HASH, "shards": [SHARD]})),
        "part": (read_part, "^part of an index: .", _records(ROWS)),
        "plan": (read_plan, r"^plan\.json: .", _records(make_plan(3, 6))),
    }
    return {
        n: Target(read, re.compile(r, re.DOTALL), seeds) for n, (read, r, seeds) in found.items()
    }
