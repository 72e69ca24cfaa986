"""Local files that are being written, and those that killed processes left."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.machine import DIGITS, machine

PARTIAL = ".partial"
# A living process that has not touched its file for so long is another one with the same number.
WRITTEN_WITHIN_S = 24 * 3600.0
# .NAME.HOST-DIGEST.PROCESS.RANDOM.partial; names and hosts may have dots and dashes.
STAGED = re.compile(rf"(\..+\..+-[0-9a-f]{{{DIGITS}}})\.(\d{{1,9}})\.\w+\{PARTIAL}")
# The same whoever wrote it, earlier versions included, whose hosts had no digest.
OURS = re.compile(rf"\..+\..+\.\d{{1,9}}\.\w+\{PARTIAL}")


@contextmanager
def staged(folder: Path, name: str) -> Iterator[Path]:
    """A new file in `folder` whose name tells who writes it; gone at the end, whatever happens."""
    stem = f".{name}.{machine()}.{os.getpid()}."
    handle, partial = tempfile.mkstemp(prefix=stem, suffix=PARTIAL, dir=folder)
    os.close(handle)
    try:
        yield Path(partial)
    finally:
        Path(partial).unlink(missing_ok=True)


def is_ours(name: str) -> bool:
    """Whether a file's name is one that `staged` gives; others are not ours to remove."""
    return OURS.fullmatch(name) is not None


def written_here(partial: Path) -> bool:
    """Whether the process that staged it was one of this machine's, as `machine()` has it."""
    return _writer(partial) is not None


def in_use(partial: Path, *, age_s: float) -> bool:
    """Whether a living process of this machine writes it."""
    pid = _writer(partial)
    return pid is not None and process_alive(pid) and age_s < WRITTEN_WITHIN_S


def abandoned(partial: Path, *, age_s: float) -> bool:
    """Whether a process that is gone staged it.

    Of others than this machine's only age tells: of containers that share a folder, or of this
    machine before it started anew.
    """
    if written_here(partial):
        return not in_use(partial, age_s=0.0)
    return STAGED.fullmatch(partial.name) is not None and age_s > WRITTEN_WITHIN_S


def _writer(partial: Path) -> int | None:
    """The process that staged it, if it was one of this machine's."""
    match = STAGED.fullmatch(partial.name)
    return int(match[2]) if match and match[1].endswith(f".{machine()}") else None


def process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
