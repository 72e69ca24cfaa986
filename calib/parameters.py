"""Construct losses, methods and models by name, and check their names and parameters."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from semix.data.errors import InputError, choices

T = TypeVar("T")


def look_up(entries: Mapping[str, T], name: str, *, field: str) -> T:
    """The entry of that name. Raises InputError, which lists the names, the most similar first."""
    if name not in entries:
        raise InputError(field, name, choices(name, entries))
    return entries[name]


def construct(
    kind: Callable[..., T], num_classes: int, *, params: Mapping[str, Any], field: str
) -> T:
    """Return `kind(num_classes, **params)`.

    Raises:
        InputError: there are fewer than two classes, or `kind` has no such parameter.
    """
    remedy = "give a whole number of at least 2"
    require_range("num_classes", num_classes, low=2, remedy=remedy, whole=True)
    accepted = [name for name in inspect.signature(kind).parameters if name != "num_classes"]
    check_parameter_names(params, accepted, field=field)
    return kind(num_classes, **params)


def check_parameter_names(
    params: Mapping[str, Any], accepted: Sequence[str], *, field: str
) -> None:
    """Raise InputError for the first parameter that is not accepted."""
    for name, value in params.items():
        if name not in accepted:
            names = f"choose from {', '.join(accepted)}" if accepted else "there are none"
            remedy = f"unknown parameter; {names}"
            raise InputError(f"{field}.{name}", value, remedy)


def require_range(
    field: str,
    value: float,
    *,
    remedy: str,
    low: float = -math.inf,
    high: float = math.inf,
    whole: bool = False,
) -> None:
    """Raise InputError with this remedy unless low <= value <= high.

    Args:
        whole: whether the value must be a whole number.
    """
    types = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
        raise InputError(field, value, remedy)


def require_one_of(field: str, value: str, allowed: Sequence[str]) -> None:
    """Raise InputError unless the value is among the allowed ones."""
    if value not in allowed:
        raise InputError(field, value, choices(value, allowed))
