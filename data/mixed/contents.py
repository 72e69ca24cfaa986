"""What one shard holds: the records of its groups, and where each image's bytes lie."""

import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.files import write_atomically
from data.schemas import read_group_record
from data.shards import GroupPlace, scan_tar

Record = dict[str, Any]


@dataclass(frozen=True)
class ShardContents:
    """One shard, read without touching an image.

    Attributes:
        records: `KEY.json` of each of its g groups.
        places: int64 [g, A, 2], offset and size in the tar of each image.
    """

    records: list[Record]
    places: np.ndarray


def read_contents(descriptor: int, shard: Mapping[str, Any]) -> ShardContents:
    """Read records and places from an open tar.

    Args:
        shard: its entry in an index.
    Raises:
        ValueError: it is damaged or not as its index says; names the tar.
    """
    try:
        with io.FileIO(descriptor, closefd=False) as raw, io.BufferedReader(raw) as file:
            file.seek(0)
            found = list(scan_tar(file, most_bytes=shard["bytes"]))
        records = [_record(descriptor, place) for place in found]
        _check(found, shard)
    except ValueError as error:
        raise ValueError(f"{shard['tar']}: {error}; run `semix verify`") from None
    return ShardContents(records, np.array([place.images for place in found], dtype=np.int64))


def kept_contents(path: Path) -> ShardContents | None:
    """What `keep_contents` wrote; None if it is not there, or damaged."""
    try:
        digest, _, text = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        return None
    found = json.loads(text)
    return ShardContents(found["records"], np.array(found["places"], dtype=np.int64))


def keep_contents(path: Path, contents: ShardContents) -> None:
    """Keep contents in a file, so that a remote tar is not read again for its records."""
    found = {"records": contents.records, "places": contents.places.tolist()}
    text = json.dumps(found).encode()
    write_atomically(path, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def _record(descriptor: int, place: GroupPlace) -> Record:
    record = read_group_record(os.pread(descriptor, place.record.size, place.record.offset))
    if record["group"] != place.group or len(record["alphas"]) != len(place.images):
        count = len(record["alphas"])
        found = f"record of group {record['group']} with {count} alphas"
        raise ValueError(f"group {place.group} with {len(place.images)} images has the {found}")
    return record


def _check(found: list[GroupPlace], shard: Mapping[str, Any]) -> None:
    if len(found) != shard["groups"]:
        raise ValueError(f"{len(found)} groups, its index says {shard['groups']}")
    first = shard.get("first", found[0].group)
    for group, place in enumerate(found, start=first):
        if place.group != group:
            raise ValueError(f"holds group {place.group} where {group} belongs")
        if len(place.images) != len(found[0].images):
            raise ValueError(f"group {group} has {len(place.images)} images, others have more")
