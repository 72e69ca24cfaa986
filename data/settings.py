"""Settings: frozen pydantic models, read from YAML with overrides; errors list every mistake."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Tag, ValidationError
from pydantic_core import ErrorDetails

from semix.data.errors import NOT_SHOWN, InputError, choices
from semix.data.files import read_bytes
from semix.data.store import Store
from semix.data.store.location import parse_url, printable_url

KNOWN = "known here:"
MAX_SUGGESTIONS = 3  # settings in other sections that are suggested for a misplaced key
TAB = r"found character '\t'"  # in the parser's message
MAX_BYTES = 16 * 2**20  # bytes of a config; those in configs/ have a few thousand
MAX_MISTAKES = 20  # shown at once
MAX_KEY = 100  # characters shown of a key
# Characters and values that aliases may add to a file; nested aliases multiply its size.
MAX_REPEATED = 1 << 20


class Settings(BaseModel):
    """Base of every settings model: frozen; refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


S = TypeVar("S", bound=Settings)


def one_of(kinds: Mapping[str, type[Settings]], *, key: str = "name", default: str = "") -> Any:
    """A type for a section that is one of several kinds of settings.

    Args:
        kinds: by the value of the setting `key` that chooses them.
        default: the kind of a section without that setting; "" requires it.
    """

    def kind_of(section: Any) -> str | None:
        given = section.get(key) if isinstance(section, dict) else getattr(section, key, None)
        return str(given) if given is not None else default or None

    kind_of.__name__ = key  # pydantic's errors have this name
    members = tuple(Annotated[kind, Tag(name)] for name, kind in kinds.items())
    return Annotated[Union[members], Discriminator(kind_of)]  # noqa: UP007


def load_settings(
    kind: type[S], source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> S:
    """Read settings from a YAML file or a mapping.

    Args:
        source: a local path, a URL that a store accepts, or the values.
        overrides: texts like `mixing.seed=7`; the value is read as YAML.
    Raises:
        InputError: no such file or no permission, not YAML; unknown keys, with the most
            similar known key, and values out of range. One error lists all of them by their
            dotted paths, one per line.
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
        section = values.get(key)
        if section is None:
            section = values[key] = {}
        if not isinstance(section, dict):
            raise InputError("--set", override, f"{key} is a value, not a section")
        values = section
    try:
        values[keys[-1]] = read_yaml(text)
    except ValueError as error:
        raise InputError("--set", path, f"cannot be read as YAML: {error}") from None


def _mistakes(
    kind: type[Settings], error: ValidationError, values: Mapping[str, Any]
) -> InputError:
    """One error for all mistakes: the first one, with a line in its remedy for each further one."""
    mistakes: list[InputError] = []
    for detail in sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden"):
        mistake = _mistake(kind, detail, values)
        # A required key that is misspelt is also reported as missing; the misspelling says more.
        misspelt = detail["type"] == "missing" and any(
            f"did you mean {mistake.field}?" in other.remedy for other in mistakes
        )
        # Each member of a union reports the same value, or parts of it.
        if not misspelt and not any(_overlap(mistake.field, other.field) for other in mistakes):
            mistakes.append(mistake)
    first, lines = mistakes[0], []
    for other, before in zip(mistakes[1:MAX_MISTAKES], mistakes, strict=False):
        # The same list of all known settings is not repeated.
        is_repeated = KNOWN in other.remedy and other.remedy == before.remedy
        remedy = "unknown setting here, too" if is_repeated else other.remedy
        lines.append(str(InputError(other.field, other.value, remedy)))
    if len(mistakes) > MAX_MISTAKES:
        lines.append(f"and {len(mistakes) - MAX_MISTAKES} more")
    return InputError(first.field, first.value, "\n".join([first.remedy, *lines]))


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _mistake(kind: type[Settings], detail: ErrorDetails, values: Mapping[str, Any]) -> InputError:
    keys = _existing_keys(detail["loc"], values)
    path, value = ".".join(keys) or "config", detail["input"]
    if detail["type"] == "extra_forbidden":
        return _unknown(kind, keys, known=_known_keys(kind, detail["loc"][:-1]))
    if detail["type"] == "missing":
        missing = ".".join([*keys, str(detail["loc"][-1])])
        return InputError(missing, "nothing", "this setting is required")
    if detail["type"] == "union_tag_invalid":
        return _unknown_kind(keys, detail["ctx"])
    if detail["type"] == "union_tag_not_found" and isinstance(value, Mapping):
        field = _discriminator(detail["ctx"])
        return InputError(".".join([*keys, field]), "nothing", "this setting is required")
    if detail["type"] in ("model_type", "union_tag_not_found"):
        return InputError(path, repr(value), "must hold `key: value` settings")
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "literal_error" and isinstance(value, str):
        message = choices(value, re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    # The settings of a section do not fit together: showing all would fill the screen.
    shown_value = NOT_SHOWN if isinstance(value, Mapping) else repr(value)
    return InputError(path, shown_value, message[0].lower() + message[1:])


def _existing_keys(location: Sequence[int | str], values: Any) -> list[str]:
    """The keys of a location that exist in the values; a union adds the name of a member to it."""
    existing = []
    for key in location:
        inside = isinstance(values, Mapping) and key in values
        if inside or (isinstance(values, list | tuple) and isinstance(key, int)):
            existing.append(str(key)[:MAX_KEY])
            values = values[key]
    return existing


def _unknown(kind: type[Settings], keys: Sequence[str], *, known: Sequence[str]) -> InputError:
    """The error for an unknown key. It hides the value: the file may hold secrets by mistake."""
    similar = difflib.get_close_matches(keys[-1], known, n=1)
    paths = _same_name_elsewhere(kind, keys) or [".".join([*keys[:-1], name]) for name in similar]
    remedy = f"did you mean {' or '.join(paths)}?" if paths else f"{KNOWN} {', '.join(known)}"
    newer = "" if paths else "; a newer semix may know it"
    return InputError(".".join(keys), NOT_SHOWN, f"unknown setting; {remedy}{newer}")


def _same_name_elsewhere(kind: type[BaseModel], keys: Sequence[str]) -> list[str]:
    """Dotted paths of settings of the same name in other sections.

    Settings of a section that is one of several kinds come last; of each, the shortest come first.
    """
    known = sorted(_paths(kind), key=lambda item: (item[0], item[1].count(".")))
    paths = [path for _, path in known if path.split(".")[-1] == keys[-1]]
    if ".".join(keys) in paths:  # it exists here, but another setting of this section excludes it
        return []
    return list(dict.fromkeys(paths))[:MAX_SUGGESTIONS]


def _paths(kind: type[BaseModel], *, depends: bool = False) -> Iterator[tuple[bool, str]]:
    """Dotted paths of all settings, except in lists and below keys that the user chooses.

    With each comes whether it depends on the kind of its section.
    """
    for name, field in kind.model_fields.items():
        yield depends, name
        inner = _models(field.annotation, single=True).values()
        for model in inner:
            for each, path in _paths(model, depends=depends or len(inner) > 1):
                yield each, f"{name}.{path}"


def _unknown_kind(keys: Sequence[str], context: Mapping[str, Any]) -> InputError:
    """The error for an unknown value of the field that chooses among kinds of settings."""
    known = context["expected_tags"].replace("'", "").split(", ")
    path = ".".join([*keys, _discriminator(context)])
    return InputError(path, context["tag"], choices(context["tag"], known))


def _discriminator(context: Mapping[str, Any]) -> str:
    """The field that chooses among kinds of settings, from the context of an error."""
    # It stands in quotes, or is a function named after the field.
    return str(context["discriminator"]).strip("'").removesuffix("()")


def _known_keys(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Names of the settings that may stand at a location below a model of `kind`."""
    models = {"": kind}
    for key in location:
        if key in models:  # the name that a union gives a member
            models = {str(key): models[str(key)]}
            continue
        fields = [model.model_fields.get(str(key)) for model in models.values()]
        inner = [_models(field.annotation) for field in fields if field is not None]
        if inner:  # else a position in a list or dictionary of models
            models = {name: model for inner_models in inner for name, model in inner_models.items()}
    return sorted({name for model in models.values() for name in model.model_fields})


def _models(annotation: Any, *, single: bool = False) -> dict[str, type[BaseModel]]:
    """The models in a type annotation, by the name that a union gives them in a location.

    Args:
        single: leave out models in lists and dictionaries, which may hold several.
    """
    if single and get_origin(annotation) in (list, tuple, dict):
        return {}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation.__name__: annotation}
    args = get_args(annotation)
    tags = [arg.tag for arg in args if isinstance(arg, Tag)]
    if get_origin(annotation) is Annotated and tags:
        return {tag: model for model in _models(args[0], single=single).values() for tag in tags}
    return {name: model for arg in args for name, model in _models(arg, single=single).items()}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as a flat dictionary with dotted names."""
    values: dict[str, Any] = {}
    for key, item in settings.items():
        name = f"{prefix}{key}"
        values |= flat(item, f"{name}.") if isinstance(item, Mapping) else {name: item}
    return values


def whole_section(name: str, *flat_settings: Mapping[str, Any]) -> str:
    """The outermost section of a setting that is a key of these flat settings, else its name."""
    names = name.split(".")
    sections = (".".join(names[:count]) for count in range(1, len(names)))
    existing = (s for s in sections if any(s in settings for settings in flat_settings))
    return next(existing, name)


def in_words(settings: Mapping[str, Any], name: str) -> str:
    """The value of a setting, or of a section of flat settings, for a message."""
    if name in settings:
        return "none" if settings[name] is None else str(settings[name])
    return "given" if any(key.startswith(f"{name}.") for key in settings) else "not set"


def whole_path(source: str | Path) -> str:
    """The absolute path, which is valid in any working directory; a URL stays as it is."""
    return str(source) if "://" in str(source) else str(Path(source).absolute())


def read_config_file(source: str | Path) -> dict[str, Any]:
    """Read a YAML file of settings.

    Args:
        source: a local path, or a URL that a store accepts.
    Raises:
        InputError: no such file or no permission, not YAML, too much repetition, not settings.
    """
    name = printable_url(str(source))  # a query may be a secret
    content = _content(str(source))
    try:
        values = read_yaml(_text(content, name))
    except ValueError as error:
        raise InputError("config", name, f"cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError("config", name, "must hold `key: value` lines")
    return values


def _text(content: bytes, name: str) -> str:
    """Decode the content of a file; errors show its name."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        remedy = "is not text in UTF-8, but perhaps a picture or an archive"
        remedy += "; give the path or URL of a YAML file"
        raise InputError("config", name, remedy) from None


def read_yaml(text: str) -> Any:
    """The values of one YAML document; None if it is empty.

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
        # A message may end in a quoted name from the text, which is cut off; quoted tokens stay.
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
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":  # as the key `on`, which YAML 1.1 reads as true
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # constructors raise various errors, most of which quote the value
            problem = f"is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _check_alias_expansion(root: yaml.Node) -> None:
    """Raise if aliases make a document much larger than its text, or endless."""
    sizes: dict[yaml.Node, int] = {}  # of each node with aliases expanded; 0 while it is counted
    text_size = 0

    def size(node: yaml.Node) -> int:
        nonlocal text_size
        if node in sizes:
            if not sizes[node]:
                _raise_at(node, "an alias stands inside its own anchor")
            return sizes[node]
        sizes[node] = 0
        own_size = 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        text_size += own_size
        sizes[node] = own_size + sum(size(child) for child in _child_nodes(node))
        if sizes[node] > text_size + MAX_REPEATED:
            _raise_at(node, "aliases repeat too much here; write the values out")
        return sizes[node]

    size(root)


def _child_nodes(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (part for pair in node.value for part in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _raise_at(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.composer.ComposerError(None, None, problem, node.start_mark)


def _content(source: str) -> bytes:
    name = printable_url(source)  # a query may be a secret
    try:
        return _fetch(source) if "://" in source else read_bytes(Path(source), max_bytes=MAX_BYTES)
    except FileNotFoundError:
        remedy = "there is no such file; give the path or URL of a YAML file"
        raise InputError("config", name, remedy) from None
    except IsADirectoryError:
        remedy = "is a folder; give the path or URL of a YAML file"
        raise InputError("config", name, remedy) from None
    except InputError as error:  # about its size, the URL, its bucket or the credentials
        raise InputError("config", name, error.remedy) from None
    except OSError as error:
        raise InputError("config", name, f"cannot be read: {error.strerror or error}") from None


def _fetch(url: str) -> bytes:
    location = parse_url(url)
    if location.protocol == "file":
        return read_bytes(Path(location.base), max_bytes=MAX_BYTES)
    folder, _, name = location.url.rpartition("/")
    if folder.endswith("/"):  # the URL is only a bucket
        raise IsADirectoryError
    return Store(folder).get(name, max_bytes=MAX_BYTES)
