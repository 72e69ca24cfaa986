"""One shard from first byte to last: hashes, every image, every label, its features."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from data.images import decode_image
from data.shards import GroupSample, read_tar
from data.store import Store
from data.tensors import read_arrays

Record = dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """What a plan says of a shard.

    Attributes:
        groups: their numbers; images: of each; classes: how many the plan has.
    """

    groups: range
    images: int
    classes: int


def tar_problems(store: Store, record: Record, expected: Expected) -> Iterator[str]:
    """Reads the tar once, and no more than a series of it is in memory."""
    with store.open(record["tar"]) as file:
        read = Hashing(file)
        problem = _series_problem(io.BufferedReader(read, 2**20), record, expected)
        if read.hexdigest() != record["sha256"]:
            yield "does not have the recorded SHA-256"
        if problem:
            yield problem


def features_problems(store: Store, record: Record, expected: Expected) -> Iterator[str]:
    content = store.get(record["features"]["name"])
    if hashlib.sha256(content).hexdigest() != record["features"]["sha256"]:
        yield "does not have the recorded SHA-256"
    try:
        tensors, _ = read_arrays(content, where="features")
    except ValueError as error:
        yield f"damaged safetensors: {error}"
        return
    if "features" not in tensors:
        yield "has no tensor 'features'"
    for name, tensor in sorted(tensors.items()):
        yield from _tensor_problems(name, tensor, expected)


class Hashing(io.RawIOBase):
    """A file that hashes what is read of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._hash.update(content)
        return len(content)

    def hexdigest(self) -> str:
        """Of the whole file: what was not read so far is read now."""
        while content := self._file.read(2**20):
            self._hash.update(content)
        return self._hash.hexdigest()


def _series_problem(file: BinaryIO, record: Record, expected: Expected) -> str | None:
    found = []
    try:
        for sample in read_tar(file, most_bytes=record["bytes"]):
            found.append(sample.record["group"])
            _check_series(sample, expected)
    except ValueError as error:
        return str(error)
    if found != list(expected.groups):
        wanted = f"{expected.groups.start} to {expected.groups.stop - 1}"
        return f"holds {len(found)} groups that are not those of the plan, {wanted}"
    return None


def _check_series(sample: GroupSample, expected: Expected) -> None:
    group, record = sample.record["group"], sample.record
    if len(sample.images) != expected.images:
        raise ValueError(f"group {group} has {len(sample.images)} images, not {expected.images}")
    named = {*record["classes"], *(target for label in record["labels"] for target, _ in label)}
    if max(named) >= expected.classes:
        raise ValueError(f"group {group} names class {max(named)} of {expected.classes}")
    shapes = set()
    for position, image in enumerate(sample.images):
        try:
            shapes.add(decode_image(image).shape)
        except ValueError as error:
            raise ValueError(f"group {group}, image {position}: {error}") from None
    if len(shapes) > 1:
        raise ValueError(f"group {group} has images of several sizes")


def _tensor_problems(name: str, tensor: np.ndarray, expected: Expected) -> Iterator[str]:
    wanted = (len(expected.groups), expected.images)
    if tensor.ndim != 3 or tensor.shape[:2] != wanted:
        yield f"{name} has shape {list(tensor.shape)}, not [{wanted[0]}, {wanted[1]}, width]"
    if tensor.dtype != np.float16:
        yield f"{name} is {tensor.dtype}, not float16"
    elif not np.isfinite(tensor).all():
        yield f"{name} holds values that are no finite numbers"
