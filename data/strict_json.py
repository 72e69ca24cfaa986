"""JSON from anywhere: bounded, finite, no key twice, checked by a model."""

import json
import math
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class Strict(BaseModel):
    """Base of what a stored file may hold: no other keys, no conversions, finite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


PLAIN = re.compile(r"\w{1,60}", re.ASCII)
S = TypeVar("S", bound=BaseModel)


def read_strictly(model: type[S], content: bytes, *, what: str, most: int) -> S:
    """What `content` spells, once `model` accepts it.

    Args:
        what: its name in messages.
        most: bytes; more are refused before any is parsed.
    Raises:
        ValueError: `what: field: problem`. Nesting of any depth, numbers of any length and
            broken UTF-8 are problems like others.
    """
    if len(content) > most:
        raise ValueError(f"{what}: {len(content)} bytes, at most {most} are read")
    try:
        # First, because pydantic's parser bounds nesting and the digits of a number.
        found = model.model_validate_json(content)
        json.loads(content, object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        message = problem["msg"].removeprefix("Value error, ")
        raise ValueError(f"{what}: {_path(problem['loc'])}{message}") from None
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {_shown(twice)} stands twice")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{_shown(text)} is no finite number")
    return number


def _path(place: tuple[int | str, ...]) -> str:
    names = (str(part) for part in place)
    path = ".".join(name if PLAIN.fullmatch(name) else _shown(name) for name in names)
    return f"{path}: " if path else ""


def _shown(text: str, most: int = 60) -> str:
    """As plain ASCII: what a hostile file spells must not steer a terminal."""
    return ascii(text if len(text) <= most else text[:most] + "...")
