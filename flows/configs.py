"""Configs of builds, training runs and studies: recognise a file, list the settings."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from semix.data.errors import InputError
from semix.data.settings import Settings, load_settings, read_config_file
from semix.data.store.location import printable_url

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
    """As `load_settings`, but the error for another command's config names that command.

    Raises:
        InputError: as for `load_settings`.
    """
    try:
        return load_settings(model, source, overrides)
    except InputError:
        command = None if isinstance(source, Mapping) else command_of(source)
        if command is None or issubclass(model, models()[command]):
            raise
        name = printable_url(str(source))
        remedy = f"is {NAMES[command]}: semix {command} {name} --out PLACE"
        raise InputError("config", name, remedy) from None


def command_of(source: str | Path) -> str | None:
    """The command that a config file belongs to, by its sections; None if that is ambiguous.

    Raises:
        InputError: it cannot be read.
    """
    sections = set(read_config_file(source))
    matches = {name: len(sections & set(model.model_fields)) for name, model in models().items()}
    max_count = max(matches.values())
    commands = [name for name, count in matches.items() if count == max_count]
    return commands[0] if len(commands) == 1 else None


def reference(command: str, key: str = "") -> list[dict[str, Any]]:
    """Every setting of a command's config, in order: key, type, default, limits, description.

    Args:
        key: restrict the list to this section or setting.
    Raises:
        InputError: no setting has this key.
    """
    schema = models()[command].model_json_schema()
    rows = list(_rows(schema, schema.get("$defs", {})))
    selected = [row for row in rows if f"{row['key']}.".startswith(f"{key}.") or not key]
    if not selected:
        keys = list(dict.fromkeys(row["key"] for row in rows))
        closest = difflib.get_close_matches(key, keys, n=1)
        sections = ", ".join(name for name in keys if "." not in name)
        hint = f"did you mean {closest[0]}?" if closest else f"choose from {sections}"
        raise InputError("KEY", key, f"no setting of a {command} config; {hint}")
    return selected


def _rows(
    schema: Schema, sections: Mapping[str, Schema], prefix: str = "", conditions: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Rows of a model and its nested models; keys begin with `prefix`, limits with `conditions`."""
    for name, field in schema["properties"].items():
        key, nested = f"{prefix}{name}", [sections[ref] for ref in _sections_in(field)]
        text = field.get("description") or next((s.get("description", "") for s in nested), "")
        yield {
            "key": key,
            "type": _type(field),
            "required": name in schema.get("required", ()),
            "default": field.get("default"),
            "limits": [*conditions, *_limits(field)],
            "description": " ".join(text.split()),
        }
        if "parts" in field:
            yield from _component_rows(key, field, conditions)
            continue
        nested_prefix = f"{key}.{'NAME.' if 'additionalProperties' in field else ''}"
        for section in nested:
            method = section["properties"].get("method", {}) if len(nested) > 1 else {}
            methods = method.get("enum") or ([method["const"]] if "const" in method else [])
            condition = [f"where {key}.method is {' or '.join(methods)}"] if methods else []
            yield from _rows(section, sections, nested_prefix, [*conditions, *condition])


def _component_rows(key: str, field: Schema, conditions: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of a component that is selected by name, as a loss, and of each one's parameters."""
    components, default = field["parts"], field.get("default", {}).get("name")
    row = {"required": False, "default": None, "limits": [*conditions], "description": ""}
    name_row = {"required": default is None, "default": default}
    yield row | {"key": f"{key}.name", "type": f"one of {', '.join(components)}"} | name_row
    for name in dict.fromkeys(name for parameters in components.values() for name in parameters):
        owners = ", ".join(kind for kind, parameters in components.items() if name in parameters)
        yield row | {"key": f"{key}.{name}", "type": f"parameter of {owners}"}


def _sections_in(field: Schema) -> list[str]:
    """Names of the models that a field, its alternatives or its items refer to."""
    if "$ref" in field:
        return [field["$ref"].rpartition("/")[2]]
    schemas = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    schemas += [
        field[name]
        for name in ("items", "additionalProperties")
        if isinstance(field.get(name), dict)
    ]
    return [name for schema in schemas for name in _sections_in(schema)]


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
    for alternative in field.get("anyOf", ()):
        limits += _limits(alternative)
    return limits
