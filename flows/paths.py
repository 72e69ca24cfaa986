"""Places in the parameters of a deployment's run: whole ones only."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import InputError
from data.files import require_own_files

PLACES = ("config", "out", "url", "run", "to")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # a path has one slash of a URL's left


def local_path(name: str, place: str | Path, remedy: str) -> Path:
    """A place on a disk, absolute.

    Raises:
        InputError: it is a URL, which would become a folder named `s3:`.
    """
    if found := SCHEME.match(str(place)):
        raise InputError(name, f"{found[1]}://{str(place)[found.end() :]}", remedy)
    return Path(place).absolute()


def check_writable(name: str, place: Path) -> None:
    """As far as can be told without writing. Raises InputError."""
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    code = 0
    if there != place and not there.is_dir():
        code = errno.ENOTDIR
    elif not os.access(there, os.W_OK):
        code = errno.EACCES
    if code:
        remedy = f"cannot be written ({os.strerror(code)}); choose another place"
        raise InputError(name, place, remedy)


def training_folder(place: str | Path) -> Path:
    """As `local_path`, where networks are trained.

    Raises:
        InputError: likewise, and for a folder that holds links.
    """
    found = local_path("out", place, "networks are trained in a folder; give one that all see")
    require_own_files("out", found)
    return found


def own_file(name: str, place: str | Path) -> Path:
    """As `local_path`, of what a command writes for its user.

    Raises:
        InputError: likewise, and for a place that cannot be written.
    """
    found = local_path(name, place, "is written on this machine; name a file or folder of its own")
    check_writable(name, found)
    return found


def check_places(parameters: Mapping[str, Any]) -> None:
    """Refuse relative paths, which would end in a folder that the worker deletes.

    Raises:
        InputError: names the parameter.
    """
    for name in PLACES:
        value = parameters.get(name) or ""
        if value and "://" not in value and not Path(value).is_absolute():
            remedy = (
                "a worker runs each flow in a new folder and deletes it afterwards; give a whole "
                "path, or a URL"
            )
            raise InputError(name, value, remedy)
