"""Places in the parameters of a deployment's run: whole ones only."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import InputError

PLACES = ("config", "out", "url", "run")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # a path has one slash of a URL's left


def local_path(name: str, place: str | Path, remedy: str) -> Path:
    """A place on a disk, absolute.

    Raises:
        InputError: it is a URL, which would become a folder named `s3:`.
    """
    if found := SCHEME.match(str(place)):
        raise InputError(name, f"{found[1]}://{str(place)[found.end() :]}", remedy)
    return Path(place).absolute()


def training_folder(place: str | Path) -> Path:
    """As `local_path`, where networks are trained."""
    return local_path("out", place, "networks are trained in a folder; give one that all see")


def own_file(name: str, place: str | Path) -> Path:
    """As `local_path`, of what a command writes for its user."""
    return local_path(name, place, "is written on this machine; name a file or folder of its own")


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
