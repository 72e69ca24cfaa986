"""Construct losses, methods and models by name; refuse unknown names and invalid parameters."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from semix.data.errors import InputError, choices

T = TypeVar("T")


def choose(kinds: Mapping[str, T], name: str, *, field: str) -> T:
    """The entry of that name. Raises InputError that lists the names, the nearest first."""
    if name not in kinds:
        raise InputError(field, name, choices(name, kinds))
    return kinds[name]


def construct(
    kind: Callable[..., T], num_classes: int, *, params: Mapping[str, Any], field: str
) -> T:
    """`kind(num_classes, **params)`.

    Raises:
        InputError: fewer than two classes, or a parameter that `kind` does not have.
    """
    what = "give a whole number of at least 2"
    in_range("num_classes", num_classes, low=2, what=what, whole=True)
    known = [name for name in inspect.signature(kind).parameters if name != "num_classes"]
    check_known(params, known, field=field)
    return kind(num_classes, **params)


def check_known(params: Mapping[str, Any], known: Sequence[str], *, field: str) -> None:
    """Raises InputError for the first parameter that is not among the known ones."""
    for name, value in params.items():
        if name not in known:
            remedy = f"unknown parameter; choose from {', '.join(known)}" if known else "takes none"
            raise InputError(f"{field}.{name}", value, remedy)


def in_range(
    field: str,
    value: float,
    *,
    what: str,
    low: float = -math.inf,
    high: float = math.inf,
    whole: bool = False,
) -> None:
    """Raises InputError with `what` as the remedy unless low <= value <= high."""
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise InputError(field, value, what)


def one_of(field: str, value: str, known: Sequence[str]) -> None:
    """Raises InputError unless the value is one of the known ones."""
    if value not in known:
        raise InputError(field, value, choices(value, known))
