"""A YAML file of settings, read from a local path or a URL."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from data.errors import InputError
from data.store import Store
from data.store.urls import parse_url, shown

# What aliases may add to a file, in characters and values; they can multiply without end.
MOST_REPEATED = 1 << 20


def whole_path(source: str | Path) -> str:
    """A path from the root of the file system, which holds elsewhere too; a URL as it is."""
    return str(source) if "://" in str(source) else str(Path(source).absolute())


def read_config_file(source: str | Path) -> dict[str, Any]:
    """What the file holds.

    Args:
        source: a local path, or a URL of the kinds that a store takes.
    Raises:
        InputError: no such file or no permission, not YAML, aliases that repeat
            too much, not settings.
    """
    content = _content(str(source))
    try:
        values = read_yaml(content.decode())
    except ValueError as error:
        raise InputError("config", source, f"cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError("config", source, "must hold `key: value` lines")
    return values


def read_yaml(text: str) -> Any:
    """The values of one YAML document; None of an empty one.

    Raises:
        ValueError: line, column and problem. It quotes nothing of the text, which may be a file
            of secrets that was taken for another.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repetition(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        # Names that the text gave are quoted at the end; tokens and single characters may stay.
        problem = re.split(r""" ['"](?!<|.['"])""", str(error.problem))[0]
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
        except Exception:  # whatever a constructor ran into; most quote the value
            problem = f"is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _refuse_repetition(root: yaml.Node) -> None:
    """Raise where aliases make a document much larger than it was written, or endless."""
    sizes: dict[yaml.Node, int] = {}  # with all that a node stands for; 0 while it is counted
    written = 0

    def size(node: yaml.Node) -> int:
        nonlocal written
        if node in sizes:
            if not sizes[node]:
                _refuse(node, "an alias stands inside what it names")
            return sizes[node]
        sizes[node] = 0
        own = 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        written += own
        sizes[node] = own + sum(size(part) for part in _parts(node))
        if sizes[node] > written + MOST_REPEATED:
            _refuse(node, "aliases repeat too much here; write the values out")
        return sizes[node]

    size(root)


def _parts(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (part for pair in node.value for part in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _refuse(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.composer.ComposerError(None, None, problem, node.start_mark)


def _content(source: str) -> bytes:
    name = shown(source)  # a query may be a secret
    try:
        return _fetched(source) if "://" in source else Path(source).read_bytes()
    except FileNotFoundError:
        remedy = "there is no such file; give the path or URL of a YAML file"
        raise InputError("config", name, remedy) from None
    except IsADirectoryError:
        remedy = "is a folder; give the path or URL of a YAML file"
        raise InputError("config", name, remedy) from None
    except InputError as error:  # of the URL, its bucket or the credentials
        raise InputError("config", name, error.remedy) from None
    except OSError as error:
        raise InputError("config", name, f"cannot be read: {error.strerror or error}") from None


def _fetched(url: str) -> bytes:
    place = parse_url(url)
    if place.protocol == "file":
        return Path(place.base).read_bytes()
    folder, _, name = place.url.rpartition("/")
    if folder.endswith("/"):  # a bucket alone
        raise IsADirectoryError
    return Store(folder).get(name)
