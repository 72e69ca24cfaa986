"""JSON from untrusted sources, validated by a pydantic model.

Its size is limited, its numbers are finite, and no key is duplicate.
"""

import json
import math
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class Strict(BaseModel):
    """Base class of the pydantic models of stored files.

    No unknown keys, no conversions, finite numbers.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


SAFE_NAME = re.compile(r"\w{1,60}", re.ASCII)
S = TypeVar("S", bound=BaseModel)


def read_strictly(model: type[S], content: bytes, *, what: str, max_bytes: int) -> S:
    """Parse `content` as `model`.

    Args:
        what: name of the content in messages.
        max_bytes: longer content is refused before it is parsed.
    Raises:
        ValueError: `what: field: problem`, also for deep nesting, long numbers, broken UTF-8.
    """
    if len(content) > max_bytes:
        raise ValueError(f"{what}: {len(content)} bytes, at most {max_bytes} are read")
    try:
        # First, because pydantic's parser bounds nesting and the digits of a number.
        value = model.model_validate_json(content)
        _DECODER.decode(content.decode())
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        message = problem["msg"].removeprefix("Value error, ")
        raise ValueError(f"{what}: {_path(problem['loc'])}{message}") from None
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> None:
    """Raises ValueError for a duplicate key."""
    if len(dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {_escaped(duplicate)} is there twice")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{_escaped(text)} is not a finite number")
    return number


_DECODER = json.JSONDecoder(  # made once, because a root has a million small files
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite
)


def _path(location: tuple[int | str, ...]) -> str:
    names = (str(part) for part in location)
    path = ".".join(name if SAFE_NAME.fullmatch(name) else _escaped(name) for name in names)
    return f"{path}: " if path else ""


def _escaped(text: str, max_length: int = 60) -> str:
    """The text as plain ASCII, because a hostile file must not control a terminal."""
    return ascii(text if len(text) <= max_length else text[:max_length] + "...")
