"""Settings: frozen pydantic models, read from YAML with overrides; every mistake is named."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Tag, ValidationError
from pydantic_core import ErrorDetails
from semix.data.errors import NOT_SHOWN, InputError, choices
from semix.data.files import read_bytes
from semix.data.store import Store
from semix.data.store.places import parse_url, shown

KNOWN = "known here:"
MAX_MEANT = 3  # suggestions of settings in other sections for a misplaced key
TAB = r"found character '\t'"  # part of the parser's message
MAX_BYTES = 16 * 2**20  # bytes of a config; the largest of ours has two thousand
MAX_MISTAKES = 20  # shown at once
MAX_KEY = 100  # characters shown of a key
# Characters and values that aliases may add to a file; they can multiply without end.
MAX_REPEATED = 1 << 20


class Settings(BaseModel):
    """Base of every settings model: frozen, unknown keys refused, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


S = TypeVar("S", bound=Settings)


def load_settings(
    kind: type[S], source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> S:
    """Read settings from a YAML file or a mapping.

    Args:
        source: a local path, or a URL that a store accepts; or the values themselves.
        overrides: texts like `mixing.seed=7`; the value is read as YAML.
    Raises:
        InputError: no such file or no permission, not YAML; unknown keys (with the nearest known
            one) and values out of range, each by its dotted path, all at once, one per line.
    """
    values = read_config_file(source) if isinstance(source, str | Path) else _copy(source)
    for override in overrides:
        _apply(values, override)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _mistakes(kind, error, values) from None


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
        values[keys[-1]] = read_yaml(text)
    except ValueError as error:
        raise InputError("--set", path, f"cannot be read as YAML: {error}") from None


def _mistakes(
    kind: type[Settings], error: ValidationError, values: Mapping[str, Any]
) -> InputError:
    """One error for all mistakes: the first, whose remedy has one more line per other mistake."""
    mistakes: list[InputError] = []
    for problem in sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden"):
        mistake = _mistake(kind, problem, values)
        # A required key that is misspelt is also reported as missing; the misspelling says more.
        misspelt = problem["type"] == "missing" and any(
            f"did you mean {mistake.field}?" in other.remedy for other in mistakes
        )
        # Each member of a union reports the same value, or parts of it.
        if not misspelt and not any(_overlap(mistake.field, other.field) for other in mistakes):
            mistakes.append(mistake)
    first, lines = mistakes[0], []
    for other, before in zip(mistakes[1:MAX_MISTAKES], mistakes, strict=False):
        same = KNOWN in other.remedy and other.remedy == before.remedy  # a list of all settings
        remedy = "unknown setting here, too" if same else other.remedy
        lines.append(str(InputError(other.field, other.value, remedy)))
    if len(mistakes) > MAX_MISTAKES:
        lines.append(f"and {len(mistakes) - MAX_MISTAKES} more")
    return InputError(first.field, first.value, "\n".join([first.remedy, *lines]))


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _mistake(kind: type[Settings], problem: ErrorDetails, values: Mapping[str, Any]) -> InputError:
    keys = _written(problem["loc"], values)
    path, value = ".".join(keys) or "config", problem["input"]
    if problem["type"] == "extra_forbidden":
        return _unknown(kind, keys, known=_known_keys(kind, problem["loc"][:-1]))
    if problem["type"] == "missing":
        missing = ".".join([*keys, str(problem["loc"][-1])])
        return InputError(missing, "nothing", "this setting is required")
    if problem["type"] == "union_tag_invalid":
        return _no_such_kind(keys, problem["ctx"])
    if problem["type"] == "model_type":
        return InputError(path, repr(value), "must hold `key: value` settings")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "literal_error" and isinstance(value, str):
        message = choices(value, re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
    # A whole section does not fit together: its content would fill the screen.
    shown = NOT_SHOWN if isinstance(value, Mapping) else repr(value)
    return InputError(path, shown, message[0].lower() + message[1:])


def _written(location: Sequence[int | str], values: Any) -> list[str]:
    """The parts of a location that are keys of the values; a union adds a member's name."""
    keys = []
    for part in location:
        inside = isinstance(values, Mapping) and part in values
        if inside or (isinstance(values, list | tuple) and isinstance(part, int)):
            keys.append(str(part)[:MAX_KEY])
            values = values[part]
    return keys


def _unknown(kind: type[Settings], keys: Sequence[str], *, known: Sequence[str]) -> InputError:
    """The error for an unknown key. It hides the value: the file may hold secrets by mistake."""
    near = difflib.get_close_matches(keys[-1], known, n=1)
    meant = _of_that_name(kind, keys) or [".".join([*keys[:-1], name]) for name in near]
    remedy = f"did you mean {' or '.join(meant)}?" if meant else f"{KNOWN} {', '.join(known)}"
    newer = "" if meant else "; a newer semix may know it"
    return InputError(".".join(keys), NOT_SHOWN, f"unknown setting; {remedy}{newer}")


def _of_that_name(kind: type[BaseModel], keys: Sequence[str]) -> list[str]:
    """Dotted paths of settings of the same name in other sections, the shortest first."""
    known = sorted(_paths(kind, parts=False), key=_depth)
    known += sorted(_paths(kind, parts=True), key=_depth)
    paths = [path for path in dict.fromkeys(known) if path.split(".")[-1] == keys[-1]]
    if ".".join(keys) in paths:  # a setting of this section that excludes its other settings
        return []
    return paths[:MAX_MEANT]


def _depth(path: str) -> int:
    return path.count(".")


def _paths(kind: type[BaseModel], *, parts: bool) -> Iterator[str]:
    """Dotted paths of all settings, except in lists and under names that the user chooses.

    Args:
        parts: list only the parameters of losses, models and the like; else only the others.
    """
    for name, field in kind.model_fields.items():
        extra: Any = field.json_schema_extra or {}
        params = [param for each in extra.get("parts", {}).values() for param in each]
        yield from (f"{name}.{param}" for param in params) if parts else (name,)
        for inner in _models(field.annotation, alone=True).values():
            yield from (f"{name}.{path}" for path in _paths(inner, parts=parts))


def _no_such_kind(keys: Sequence[str], context: Mapping[str, Any]) -> InputError:
    """The error for an unknown value of the field that chooses among kinds of settings."""
    # The discriminator is the field in quotes, or a function named after the field that it reads.
    field = context["discriminator"].strip("'").removesuffix("()")
    known = context["expected_tags"].replace("'", "").split(", ")
    return InputError(".".join([*keys, field]), context["tag"], choices(context["tag"], known))


def _known_keys(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Field names of the model, or models, found by walking a location down from `kind`."""
    models = {"": kind}
    for part in location:
        if part in models:  # the name that a union gives a member
            models = {str(part): models[str(part)]}
            continue
        fields = [model.model_fields.get(str(part)) for model in models.values()]
        inner = [_models(field.annotation) for field in fields if field is not None]
        if inner:  # else a position in a list or dictionary of models
            models = {name: model for inner_models in inner for name, model in inner_models.items()}
    return sorted({name for model in models.values() for name in model.model_fields})


def _models(annotation: Any, *, alone: bool = False) -> dict[str, type[BaseModel]]:
    """The models in an annotation, by the name that a union gives them in a location.

    Args:
        alone: leave out models in lists and dictionaries, which may hold several.
    """
    if alone and get_origin(annotation) in (list, tuple, dict):
        return {}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation.__name__: annotation}
    parts = get_args(annotation)
    tags = [part.tag for part in parts if isinstance(part, Tag)]
    if get_origin(annotation) is Annotated and tags:
        return {tag: model for model in _models(parts[0], alone=alone).values() for tag in tags}
    return {name: model for part in parts for name, model in _models(part, alone=alone).items()}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as a flat dictionary with dotted names."""
    values: dict[str, Any] = {}
    for key, item in settings.items():
        name = f"{prefix}{key}"
        values |= flat(item, f"{name}.") if isinstance(item, Mapping) else {name: item}
    return values


def whole_section(name: str, *sides: Mapping[str, Any]) -> str:
    """The outermost section around a setting that is a key of a flat side, else the name."""
    parts = name.split(".")
    sections = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((each for each in sections if any(each in side for side in sides)), name)


def in_words(settings: Mapping[str, Any], name: str) -> str:
    """The value of a setting, or of a section of flat settings, for a message."""
    if name in settings:
        return "none" if settings[name] is None else str(settings[name])
    return "given" if any(key.startswith(f"{name}.") for key in settings) else "not set"


def whole_path(source: str | Path) -> str:
    """The absolute path, valid in any working directory; a URL stays as it is."""
    return str(source) if "://" in str(source) else str(Path(source).absolute())


def read_config_file(source: str | Path) -> dict[str, Any]:
    """Read a YAML file of settings.

    Args:
        source: a local path, or a URL that a store accepts.
    Raises:
        InputError: no such file or no permission, not YAML, too much repetition, not settings.
    """
    content = _content(str(source))
    try:
        values = read_yaml(_text(content, source))
    except ValueError as error:
        raise InputError("config", source, f"cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError("config", source, "must hold `key: value` lines")
    return values


def _text(content: bytes, source: str | Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        remedy = "is not text in UTF-8, but perhaps a picture or an archive"
        remedy += "; give the path or URL of a YAML file"
        raise InputError("config", source, remedy) from None


def read_yaml(text: str) -> Any:
    """The values of one YAML document; None of an empty one.

    Raises:
        ValueError: line, column and problem, without the text, which may hold secrets.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_alias_expansion(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        # The message quotes names from the text at its end; tokens and single characters may stay.
        problem = re.split(r""" ['"](?!<|.['"])""", str(error.problem))[0]
        if TAB in str(error.problem):
            problem = "a tab, which YAML does not take here; indent with spaces"
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{problem}") from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"character {error.character:#x} at position {error.position}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # constructors raise various errors, most of which quote the value
            problem = f"is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _check_alias_expansion(root: yaml.Node) -> None:
    """Raise where aliases make a document much larger than its text, or endless."""
    sizes: dict[yaml.Node, int] = {}  # of each node with aliases expanded; 0 while it is counted
    written = 0

    def size(node: yaml.Node) -> int:
        nonlocal written
        if node in sizes:
            if not sizes[node]:
                _raise_at(node, "an alias stands inside what it names")
            return sizes[node]
        sizes[node] = 0
        size_alone = 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        written += size_alone
        sizes[node] = size_alone + sum(size(part) for part in _parts(node))
        if sizes[node] > written + MAX_REPEATED:
            _raise_at(node, "aliases repeat too much here; write the values out")
        return sizes[node]

    size(root)


def _parts(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (part for pair in node.value for part in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _raise_at(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.composer.ComposerError(None, None, problem, node.start_mark)


def _content(source: str) -> bytes:
    name = shown(source)  # a query may be a secret
    try:
        return (
            _fetched(source) if "://" in source else read_bytes(Path(source), max_bytes=MAX_BYTES)
        )
    except FileNotFoundError:
        remedy = "there is no such file; give the path or URL of a YAML file"
        raise InputError("config", name, remedy) from None
    except IsADirectoryError:
        remedy = "is a folder; give the path or URL of a YAML file"
        raise InputError("config", name, remedy) from None
    except InputError as error:  # of its size, the URL, its bucket or the credentials
        raise InputError("config", name, error.remedy) from None
    except OSError as error:
        raise InputError("config", name, f"cannot be read: {error.strerror or error}") from None


def _fetched(url: str) -> bytes:
    location = parse_url(url)
    if location.protocol == "file":
        return read_bytes(Path(location.base), max_bytes=MAX_BYTES)
    folder, _, name = location.url.rpartition("/")
    if folder.endswith("/"):  # a bucket alone
        raise IsADirectoryError
    return Store(folder).get(name, max_bytes=MAX_BYTES)
