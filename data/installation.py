"""The distribution that this code was installed from, and how to add an extra to it."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "semix-calibration"  # PyPI's `semix` is a semiconductor simulator


def install_command(extra: str) -> str:
    """The pip command that adds an extra to this installation: a clone, a wheel, or by name."""
    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # run from a folder of source files
        origin = {}
    address = urlsplit(origin.get("url", ""))
    source = unquote(address.path) if address.scheme == "file" else DISTRIBUTION
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"
