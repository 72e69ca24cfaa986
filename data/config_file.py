"""A YAML file of settings, read from a local path or a URL."""

from pathlib import Path
from typing import Any

import yaml

from data.errors import InputError
from data.store import Store
from data.store.urls import parse_url, shown


def whole_path(source: str | Path) -> str:
    """A path from the root of the file system, which holds elsewhere too; a URL as it is."""
    return str(source) if "://" in str(source) else str(Path(source).absolute())


def read_config_file(source: str | Path) -> dict[str, Any]:
    """What the file holds.

    Args:
        source: a local path, or a URL of the kinds that a store takes.
    Raises:
        InputError: no such file or no permission, not YAML, not settings.
    """
    try:
        values = yaml.safe_load(_content(str(source)).decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError("config", source, f"is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError("config", source, "must hold `key: value` lines")
    return values


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
