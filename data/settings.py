"""Settings: frozen pydantic models, read from YAML with overrides, every mistake named."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from data.errors import InputError


class Settings(BaseModel):
    """Base of every settings model: frozen, unknown keys refused, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


S = TypeVar("S", bound=Settings)


def load_settings(
    kind: type[S], source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> S:
    """Read settings from a YAML file or a mapping.

    Args:
        overrides: texts like `mixing.seed=7`; the value is read as YAML.
    Raises:
        InputError: no such file, not YAML, an unknown key (with the nearest known one) or a
            value out of range, each by its dotted path.
    """
    values = _read_yaml(Path(source)) if isinstance(source, str | Path) else _copy(source)
    for override in overrides:
        _apply(values, override)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _first_problem(kind, error) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError("config", path, "there is no such file; give the path of a YAML file")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError("config", path, f"is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError("config", path, "must hold `key: value` lines")
    return values


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return value


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise InputError("--set", override, "write it as section.key=value")
    for key in keys[:-1]:
        inner = values.get(key)
        if inner is None:
            inner = values[key] = {}
        if not isinstance(inner, dict):
            raise InputError("--set", override, f"{key} is a value and has no parts")
        values = inner
    try:
        values[keys[-1]] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError("--set", override, "the value is not YAML") from None


def _first_problem(kind: type[Settings], error: ValidationError) -> InputError:
    problem = error.errors()[0]
    # A union adds the tag of the member it tried; those parts are not keys the user wrote.
    keys = [str(part) for part in problem["loc"]]
    path = ".".join(keys) or "config"
    if problem["type"] == "extra_forbidden":
        known = _known_keys(kind, keys[:-1])
        near = difflib.get_close_matches(keys[-1], known, n=1)
        where = ".".join(keys[:-1] + near[:1])
        remedy = f"did you mean {where}?" if near else f"known here: {', '.join(known)}"
        return InputError(path, problem["input"], f"unknown setting; {remedy}")
    if problem["type"] == "missing":
        return InputError(path, "nothing", "this setting is required")
    message = problem["msg"].removeprefix("Value error, ")
    # A whole section does not fit together: what it holds would fill the screen.
    given = "as given" if isinstance(problem["input"], Mapping) else repr(problem["input"])
    return InputError(path, given, message[0].lower() + message[1:])


def _known_keys(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Field names of the model found by walking `path` down from `kind`."""
    for key in path:
        field = kind.model_fields.get(key)
        options = [] if field is None else [field.annotation, *get_args(field.annotation)]
        inner = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not inner:
            return []
        kind = inner[0]
    return sorted(kind.model_fields)
