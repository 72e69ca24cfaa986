"""Environments of their own, for libraries that do not fit into that of semix."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def make_environment(folder: Path, packages: Sequence[str], *, shared: Sequence[str]) -> str:
    """Install these packages into a new environment; returns its Python.

    Args:
        packages: as for pip, with versions.
        shared: further packages, in the versions that semix has.
    """
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    python = str(folder / "bin" / "python")
    wanted = [*packages, *(f"{package}=={version(package)}" for package in shared)]
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *wanted], check=True)
    return python
