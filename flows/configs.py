"""Configs of builds, training runs and studies: recognise a file, list the settings."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from semix.data.errors import InputError
from semix.data.settings import Settings, load_settings, read_config_file
from semix.data.store.location import shown

S = TypeVar("S", bound=Settings)
Schema = Mapping[str, Any]

NAMES = {"build": "a build config", "train": "a training config", "study": "a study config"}
TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "none",
    "object": "mapping",
}
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minItems": "{} or more",
}


def models() -> dict[str, type[Settings]]:
    """The settings that each command reads."""
    from semix.calib.config import TrainConfig
    from semix.calib.study import StudyConfig
    from semix.pipeline.config import BuildConfig

    return {"build": BuildConfig, "train": TrainConfig, "study": StudyConfig}


def load_config(
    model: type[S], source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> S:
    """As `load_settings`; the error for another command's config names that command.

    Raises:
        InputError: as for `load_settings`.
    """
    try:
        return load_settings(model, source, overrides)
    except InputError:
        command = None if isinstance(source, Mapping) else command_of(source)
        if command is None or issubclass(model, models()[command]):
            raise
        name = shown(str(source))
        remedy = f"is {NAMES[command]}: semix {command} {name} --out PLACE"
        raise InputError("config", name, remedy) from None


def command_of(source: str | Path) -> str | None:
    """The command that a config file belongs to, by its sections; None if that is ambiguous.

    Raises:
        InputError: it cannot be read.
    """
    sections = set(read_config_file(source))
    shared = {name: len(sections & set(model.model_fields)) for name, model in models().items()}
    most = max(shared.values())
    matches = [name for name, count in shared.items() if count == most]
    return matches[0] if len(matches) == 1 else None


def reference(command: str, key: str = "") -> list[dict[str, Any]]:
    """Every setting of a command's config, in order: key, type, default, limits, description.

    Args:
        key: restrict the list to this section or setting.
    Raises:
        InputError: no setting has this key.
    """
    schema = models()[command].model_json_schema()
    rows = list(_rows(schema, schema.get("$defs", {})))
    chosen = [row for row in rows if f"{row['key']}.".startswith(f"{key}.") or not key]
    if not chosen:
        known = list(dict.fromkeys(row["key"] for row in rows))
        near = difflib.get_close_matches(key, known, n=1)
        top = ", ".join(name for name in known if "." not in name)
        hint = f"did you mean {near[0]}?" if near else f"choose from {top}"
        raise InputError("KEY", key, f"no setting of a {command} config; {hint}")
    return chosen


def _rows(
    schema: Schema, sections: Mapping[str, Schema], prefix: str = "", only: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Rows of a model and its nested models; keys begin with `prefix`, limits with `only`."""
    for name, field in schema["properties"].items():
        key, inner = f"{prefix}{name}", [sections[ref] for ref in _sections_in(field)]
        about = field.get("description") or next((s.get("description", "") for s in inner), "")
        yield {
            "key": key,
            "type": _type(field),
            "required": name in schema.get("required", ()),
            "default": field.get("default"),
            "limits": [*only, *_limits(field)],
            "description": " ".join(about.split()),
        }
        if "parts" in field:
            yield from _part_rows(key, field, only)
            continue
        below = f"{key}.{'NAME.' if 'additionalProperties' in field else ''}"
        for section in inner:
            choice = section["properties"].get("method", {}) if len(inner) > 1 else {}
            kinds = choice.get("enum") or ([choice["const"]] if "const" in choice else [])
            where = [f"where {key}.method is {' or '.join(kinds)}"] if kinds else []
            yield from _rows(section, sections, below, [*only, *where])


def _part_rows(key: str, field: Schema, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of a part that is chosen by name, and of the parameters of each choice."""
    parts, default = field["parts"], field.get("default", {}).get("name")
    row = {"required": False, "default": None, "limits": [*only], "description": ""}
    named = {"required": default is None, "default": default}
    yield row | {"key": f"{key}.name", "type": f"one of {', '.join(parts)}"} | named
    for name in dict.fromkeys(name for known in parts.values() for name in known):
        of = ", ".join(part for part, known in parts.items() if name in known)
        yield row | {"key": f"{key}.{name}", "type": f"parameter of {of}"}


def _sections_in(field: Schema) -> list[str]:
    """Names of the models that a field, its alternatives or its items refer to."""
    if "$ref" in field:
        return [field["$ref"].rpartition("/")[2]]
    inside = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    inside += [
        field[name]
        for name in ("items", "additionalProperties")
        if isinstance(field.get(name), dict)
    ]
    return [name for part in inside for name in _sections_in(part)]


def _type(field: Schema) -> str:
    alternatives = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    if alternatives:
        return " or ".join(dict.fromkeys(map(_type, alternatives)))
    if "$ref" in field:
        return "section"
    if "enum" in field:
        return f"one of {', '.join(map(str, field['enum']))}"
    if "const" in field:
        return str(field["const"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}" if "items" in field else "list"
    return TYPES.get(field.get("type", ""), "any value")


def _limits(field: Schema) -> list[str]:
    limits = [text.format(field[name]) for name, text in LIMITS.items() if name in field]
    for part in field.get("anyOf", ()):
        limits += _limits(part)
    return limits
