"""Paths and URLs in parameters; those of a deployment's run must be absolute."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semix.data.errors import InputError
from semix.data.files import require_own_files
from semix.data.settings import flat, read_config_file

PATH_PARAMETERS = ("config", "out", "url", "run", "to")
# Settings that hold a path or URL; others may also name a model of the hub.
PATH_SETTING = re.compile(r"(.*\.)?(real\.path|ood\.[^.]+\.path|url|weights)")
LOCAL = "local-dir:"  # before the folder of a CLIP model
ABSOLUTE_REMEDY = (
    "a worker runs each flow in a new folder and deletes it afterwards; give an absolute path or "
    "a URL"
)
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # a Path keeps one slash of a URL's two


def local_path(name: str, path: str | Path, remedy: str) -> Path:
    """An absolute path on a disk.

    Raises:
        InputError: it is a URL, which would become a folder named `s3:`.
    """
    if scheme := SCHEME.match(str(path)):
        raise InputError(name, f"{scheme[1]}://{str(path)[scheme.end() :]}", remedy)
    return Path(path).absolute()


def check_writable(name: str, target: Path) -> None:
    """Check without writing that a file or folder can be written. Raises InputError."""
    existing = next(path for path in (target, *target.parents) if os.path.lexists(path))
    error_code = 0
    if existing != target and not existing.is_dir():
        error_code = errno.ENOTDIR
    elif not os.access(existing, os.W_OK):
        error_code = errno.EACCES
    if error_code:
        remedy = f"cannot be written ({os.strerror(error_code)}); choose another place"
        raise InputError(name, target, remedy)


def training_folder(path: str | Path) -> Path:
    """As `local_path`, for a folder in which networks are trained.

    Raises:
        InputError: as for `local_path`, and for a folder that holds links.
    """
    folder = local_path("out", path, "must be a folder, which all machines of the run share")
    require_own_files("out", folder)
    return folder


def output_file(name: str, path: str | Path) -> Path:
    """As `local_path`, for an output of a command.

    Raises:
        InputError: as for `local_path`, and for a path that cannot be written.
    """
    file = local_path(name, path, "is written on this machine; name a file or folder of it")
    check_writable(name, file)
    return file


def check_places(parameters: Mapping[str, Any]) -> None:
    """Refuse relative paths, which would lie in a folder that the worker deletes.

    Raises:
        InputError: names the parameter, or the setting in the config or in an override; or the
            config cannot be read.
    """
    for name in PATH_PARAMETERS:
        if _is_relative(value := parameters.get(name) or ""):
            raise InputError(name, value, ABSOLUTE_REMEDY)
    config = parameters.get("config")
    settings = flat(read_config_file(config)) if config else {}
    settings |= dict(text.split("=", 1) for text in parameters.get("overrides") or ())
    for name, value in settings.items():
        if isinstance(value, str) and _is_relative_setting(name, value):
            raise InputError(name, value, ABSOLUTE_REMEDY)


def _is_relative(path: str) -> bool:
    return bool(path) and "://" not in path and not Path(path).is_absolute()


def _is_relative_setting(name: str, value: str) -> bool:
    """Whether a setting is a path relative to the working folder."""
    if value.startswith(LOCAL):
        return _is_relative(str(Path(value.removeprefix(LOCAL)).expanduser()))
    return _is_relative(value) if PATH_SETTING.fullmatch(name) else value.startswith(("./", "../"))
