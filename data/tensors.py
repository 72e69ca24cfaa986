"""Strict reading and writing of safetensors; sealed files carry their own hash."""

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy import ndarray
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from semix.data.fingerprint import canonical_json
from semix.data.strict_json import Strict, read_strictly

if TYPE_CHECKING:  # torch costs seconds, and most readers of a root do not need it
    from torch import Tensor

T = TypeVar("T")
Metadata = dict[str, str]
SEAL = "semix"  # the only metadata key: safetensors would write several in a random order

LENGTH = 8  # a file begins with the size of its JSON header: 8 bytes, little endian
MAX_HEADER = 16 * 2**20
MAX_DIMENSIONS = 8  # torch accepts any number, but then cannot print the tensor


class Entry(Strict):
    dtype: str
    shape: list[int] = Field(max_length=MAX_DIMENSIONS)
    data_offsets: list[int] = Field(min_length=2, max_length=2)


class Note(Strict):
    """Metadata of a sealed file: texts for a reader, and the hash of tensors and texts."""

    facts: Metadata
    sha256: str


class Header(BaseModel):
    """The header of a safetensors file: one entry per tensor, and metadata texts."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Entry]

    metadata: dict[str, str] = Field({}, alias="__metadata__")


def read_tensors(content: bytes, *, where: str) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and the texts in its metadata.

    Args:
        where: the file's name, for messages.
    Raises:
        ValueError: not a complete safetensors file. The format holds no code, and the library
            checks each offset against the size of the file.
    """
    from safetensors.torch import load

    return _read(load, content, where)


def read_arrays(content: bytes, *, where: str) -> tuple[dict[str, ndarray], dict[str, str]]:
    """`read_tensors` without torch; numpy has no bfloat16."""
    return _read(load_arrays, content, where)


def seal(tensors: "Mapping[str, Tensor | ndarray]", facts: Mapping[str, str]) -> bytes:
    """The bytes of a sealed safetensors file; equal content gives equal bytes."""
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    note = Note(facts=dict(facts), sha256=_hash(arrays, facts))
    return save_arrays(arrays, {SEAL: canonical_json(note.model_dump())})


def open_sealed(content: bytes, *, where: str = "tensors") -> tuple[dict[str, ndarray], Metadata]:
    """Tensors and facts of a sealed file. Raises ValueError if `seal` did not write it."""
    tensors, metadata = read_arrays(content, where=where)
    if SEAL not in metadata:
        raise ValueError(f"{where}: not written by semix")
    seal_note = read_strictly(Note, metadata[SEAL].encode(), what=where, max_bytes=MAX_HEADER)
    if seal_note.sha256 != _hash(tensors, seal_note.facts):
        raise ValueError(f"{where}: damaged: does not have the SHA-256 in its metadata")
    return tensors, seal_note.facts


def _hash(tensors: Mapping[str, ndarray], facts: Mapping[str, str]) -> str:
    digest = hashlib.sha256(canonical_json(dict(facts)).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} torch.{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()


def _read(
    load: Callable[[bytes], dict[str, T]], content: bytes, where: str
) -> tuple[dict[str, T], dict[str, str]]:
    length = int.from_bytes(content[:LENGTH], "little")
    if length > len(content) - LENGTH:
        raise ValueError(f"{where}: not a complete safetensors file: too short for its header")
    header = content[LENGTH : LENGTH + length]
    metadata = read_strictly(Header, header, what=where, max_bytes=MAX_HEADER).metadata
    try:
        return load(content), metadata
    # SafetensorError, and other errors of the library for an unknown type or shape.
    except Exception as error:
        raise ValueError(f"{where}: not a complete safetensors file: {error}") from None
