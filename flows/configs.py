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
Kinds = Mapping[str, Sequence[str]]  # by the setting that chooses a section's kind: its values
CHOOSERS = ("method", "name")  # settings that choose the kind of their section

NAMES = {
    "build": "a build config",
    "train": "a training config",
    "study": "a study config",
    "loop": "a loop config",
}
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
    from semix.flows.loop_config import LoopConfig
    from semix.pipeline.config import BuildConfig

    return {"build": BuildConfig, "train": TrainConfig, "study": StudyConfig, "loop": LoopConfig}


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
        key: restrict the list to this section or setting, or of a section that is one of several
            kinds to one of these, as in `loss.fedlas_ls`.
    Raises:
        InputError: no setting has this key.
    """
    schema = models()[command].model_json_schema()
    rows = list(_rows(schema, schema.get("$defs", {})))
    selected = [row for row in rows if f"{row['key']}.".startswith(f"{key}.") or not key]
    selected = selected or [
        row
        for row in rows
        for chooser, names in row["kinds"].items()
        if key in [f"{chooser.rpartition('.')[0]}.{name}" for name in names]
    ]
    if not selected:
        keys = list(dict.fromkeys(row["key"] for row in rows))
        closest = difflib.get_close_matches(key, keys, n=1)
        sections = ", ".join(name for name in keys if "." not in name)
        hint = f"did you mean {closest[0]}?" if closest else f"choose from {sections}"
        raise InputError("KEY", key, f"no setting of a {command} config; {hint}")
    return selected


def _rows(
    schema: Schema, sections: Mapping[str, Schema], prefix: str = "", kinds: Kinds | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of a model and its nested models.

    Args:
        prefix: of every key.
        kinds: those that the model belongs to, of sections around it that are one of several.
    """
    kinds = kinds or {}
    for name, field in schema["properties"].items():
        key, refs = f"{prefix}{name}", dict.fromkeys(_sections_in(field))
        nested = [sections[ref] for ref in refs]
        text = field.get("description") or next((s.get("description", "") for s in nested), "")
        yield {
            "key": key,
            "type": _type(field),
            "required": name in schema.get("required", ()),
            "default": field.get("default"),
            "kinds": kinds,
            "limits": [*_conditions(kinds), *_limits(field)],
            "description": " ".join(text.split()),
        }
        if len(nested) > 1:
            yield from _rows_of_kinds(key, nested, sections, kinds)
        elif nested:
            nested_prefix = f"{key}.{'NAME.' if 'additionalProperties' in field else ''}"
            yield from _rows(nested[0], sections, nested_prefix, kinds)


def _rows_of_kinds(
    key: str, nested: Sequence[Schema], sections: Mapping[str, Schema], kinds: Kinds
) -> Iterator[dict[str, Any]]:
    """Rows of a section that is one of several kinds, one kind after the other."""
    for section in nested:
        # The setting that chooses the kind takes other values in each of them.
        chooser = next(name for name in CHOOSERS if name in section["properties"])
        field = section["properties"][chooser]
        names = field.get("enum") or [field["const"]]
        rest = {name: each for name, each in section["properties"].items() if name != chooser}
        of_kind = {**kinds, f"{key}.{chooser}": names}
        yield {
            "key": f"{key}.{chooser}",
            "type": _type(field),
            "required": chooser in section.get("required", ()),
            "default": None,
            "kinds": of_kind,
            "limits": _conditions(kinds),
            "description": " ".join(section.get("description", "").split()),
        }
        yield from _rows({**section, "properties": rest}, sections, f"{key}.", of_kind)


def _conditions(kinds: Kinds) -> list[str]:
    return [
        f"where {key} is {' or '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}"
        for key, names in kinds.items()
    ]


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
