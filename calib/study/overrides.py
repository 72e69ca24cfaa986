"""Lay nested settings over others; named parts of another name are replaced whole."""

from collections.abc import Mapping
from typing import Any

from data.errors import InputError

NAMED = ("loss", "method", "model")  # their other keys are parameters of the part of that name


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with every value of `over` in its place; neither is changed.

    Mappings are merged, anything else is replaced; keys of `over` may be dotted names.

    Raises:
        InputError: a key that is no text, or that goes through a value without parts.
    """
    result = dict(base)
    for key, value in _nested(over).items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            other = key in NAMED and value.get("name", below.get("name")) != below.get("name")
            result[key] = dict(value) if other else merged(below, value)
        else:
            result[key] = value
    return result


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested mappings."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise InputError("overrides", repr(key), "write settings as section.key or nested")
        *sections, last = key.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise InputError("overrides", key, f"{section} is a value and has no parts")
        inner = _nested(value) if isinstance(value, Mapping) else value
        both = isinstance(inner, dict) and isinstance(place.get(last), dict)
        place[last] = merged(place[last], inner) if both else inner
    return result
