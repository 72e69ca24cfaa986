"""The fuzzed readers, each with valid inputs to start from and the errors that it may raise."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from semix.data.errors import InputError
from semix.data.formats import (
    CommitRecord,
    ExclusionFlags,
    Extension,
    Failure,
    LabelSetRecord,
    Lease,
    LeftOut,
    Plan,
    SeriesFlags,
    SeriesRecord,
    ShardLabels,
    StoredFile,
)
from semix.data.images import decode_image, encode_image
from semix.data.index import index_text, read_index
from semix.data.tar import read_tar, scan_tar
from tests.data.whole_roots import commit_record
from tests.handmade import EXAMPLES, PLAN_DIGEST, make_plan, pixels, record, sample, tar_of

IMAGE = "not a complete WebP, PNG or JPEG image: ."
TAR = (
    r"damaged tar: |does not belong in a shard|is out of order$|group \d{8} has |"
    rf"\d{{8}}\.json: record of a series: .|{IMAGE}"
)
# A file of a newer version is not damaged; readers reject it with this message.
NEWER = re.compile(r" schema = \d+: (a newer|another) version of semix wrote it, this one reads ")
FILES: dict[str, type[StoredFile]] = {
    "commit": CommitRecord,
    "failure": Failure,
    "labels": ShardLabels,
    "set": LabelSetRecord,
    "audit": SeriesFlags,
    "flags": ExclusionFlags,
    "extension": Extension,
    "lease": Lease,
}
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
    """Whether the content was read; False after an error that the target allows, others pass."""
    try:
        target.read(content)
    except ValueError as error:
        if type(error) is ValueError and target.refusal.search(str(error)):
            return False
        raise
    except InputError as error:
        if NEWER.search(str(error)):
            return False
        raise
    return True


def read_shard_bytes(content: bytes) -> None:
    locations = None
    try:
        locations = list(scan_tar(io.BytesIO(content)))
    finally:
        samples = list(read_tar(io.BytesIO(content)))
    assert locations is not None, "read_tar accepts what scan_tar refuses"
    assert len(locations) == len(samples)
    for series, location in zip(samples, locations, strict=True):
        spans = [content[span.offset : span.offset + span.size] for span in location.images]
        assert (series.images, series.record.group) == (spans, location.group)
        assert len(spans) == len(series.record.alphas) == len(series.record.labels)
        for image in series.images:
            read_image(image)


def read_image(content: bytes) -> None:
    pixels_read = decode_image(content)
    assert pixels_read.dtype == np.uint8
    assert pixels_read.shape[2:] == (3,)
    assert pixels_read.shape[0] * pixels_read.shape[1] <= 4096 * 4096


def read_index_bytes(content: bytes) -> None:
    """Check that an index which is read lists a shard once, and is written again unchanged."""
    header, shards = read_index(content)
    entries = list(shards)
    lines = [entry.written() for entry in entries]
    again, same = read_index(index_text(header.plan, lines, prototypes=header.prototypes))
    assert (header, entries) == (again, list(same))
    assert len({entry.shard for entry in entries}) == len(entries)


def read_plan_bytes(content: bytes) -> None:
    Plan.read(content, where="plan.json")


def _indices() -> list[bytes]:
    left_out = [LeftOut(group=7, reason="flat")]
    records = [commit_record(3), commit_record(4, first=6, left_out=left_out), commit_record(1000)]
    lines = [record.entry.written() for record in records]
    return [
        index_text(PLAN_DIGEST, lines[:1]),
        index_text(PLAN_DIGEST, lines, prototypes="ab" * 32),
    ]


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
    """All targets by name."""
    formats = ("webp", "png", "jpg")
    shards = [tar_of(*(sample(g, 3, extension=e) for g in range(2))) for e in formats]
    groups = [json.dumps(record(3) | more).encode() for more in ({}, LABELS, SIMPLEX)]
    definitions: dict[str, tuple[Callable[[bytes], object], str, list[bytes]]] = {
        "shard": (read_shard_bytes, TAR, shards),
        "image": (read_image, IMAGE, _images()),
        "group": (SeriesRecord.read, "^record of a series: .", groups),
        "index": (read_index_bytes, "^index: .", _indices()),
        "plan": (read_plan_bytes, r"^plan\.json: .", [json.dumps(make_plan(3, 6)).encode()]),
    }
    for name, kind in FILES.items():
        example = json.dumps(EXAMPLES[kind]).encode()
        definitions[name] = (kind.read, f"^{kind.WHAT}: .", [example])
    return {
        n: Target(read, re.compile(r, re.DOTALL), seeds)
        for n, (read, r, seeds) in definitions.items()
    }
