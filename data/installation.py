"""The distribution that this code was installed from, and the command that adds an extra."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "semix-calibration"  # PyPI's `semix` is a semiconductor simulator


def install_command(extra: str) -> str:
    """The pip command that adds an extra to this installation: from a clone, a wheel or PyPI."""
    try:
        record = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # run from a folder of source files
        record = {}
    url = urlsplit(record.get("url", ""))
    requirement = unquote(url.path) if url.scheme == "file" else DISTRIBUTION
    editable = "-e " if record.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{requirement}[{extra}]')}"
