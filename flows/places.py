"""Places in the parameters of a deployment's run: whole ones only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import InputError

PLACES = ("config", "out", "url", "run")


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
