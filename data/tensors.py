"""safetensors bytes to tensors, whatever the bytes are."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from data.strict_json import Strict, read_strictly

if TYPE_CHECKING:  # torch costs seconds, and most of what opens a root does without
    from numpy import ndarray
    from torch import Tensor

LENGTH = 8  # bytes, little endian, of the JSON header that follows
MOST_HEADER = 16 * 2**20
MOST_DIMENSIONS = 8  # torch takes any number, and then cannot print them


class Entry(Strict):
    dtype: str
    shape: list[int] = Field(max_length=MOST_DIMENSIONS)
    data_offsets: list[int] = Field(min_length=2, max_length=2)


class Header(BaseModel):
    """What precedes the numbers: one entry a tensor, and texts."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Entry]

    metadata: dict[str, str] = Field({}, alias="__metadata__")


def read_tensors(content: bytes, *, where: str) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and the texts stored beside them.

    Args:
        where: the file's name, for messages.
    Raises:
        ValueError: not a complete safetensors file. The format holds no code, and the library
            checks each offset against the bytes there are.
    """
    from safetensors.torch import load

    return _read(load, content, where)


def read_arrays(content: bytes, *, where: str) -> tuple[dict[str, "ndarray"], dict[str, str]]:
    """`read_tensors` without torch; numpy has no bfloat16."""
    from safetensors.numpy import load

    return _read(load, content, where)


def _read(
    load: Callable[[bytes], dict[str, Any]], content: bytes, where: str
) -> tuple[dict[str, Any], dict[str, str]]:
    length = int.from_bytes(content[:LENGTH], "little")
    if length > len(content) - LENGTH:
        raise ValueError(f"{where}: not a complete safetensors file: too short for its header")
    header = content[LENGTH : LENGTH + length]
    metadata = read_strictly(Header, header, what=where, most=MOST_HEADER).get("__metadata__", {})
    try:
        return load(content), metadata
    # SafetensorError, and whatever the library raises for a type or a shape it does not know.
    except Exception as error:
        raise ValueError(f"{where}: not a complete safetensors file: {error}") from None
