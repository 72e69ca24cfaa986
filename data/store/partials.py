"""Local files that are being written, and those that killed processes left."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
# A living process that has not touched its file for so long is another one with the same
# number: in a container, say, every worker is process 1.
WRITTEN_WITHIN_S = 24 * 3600.0


@contextmanager
def staged(folder: Path, name: str) -> Iterator[Path]:
    """A new file in `folder` whose name tells who writes it; gone at the end, whatever happens."""
    stem = f".{name}.{socket.gethostname()}.{os.getpid()}."
    handle, partial = tempfile.mkstemp(prefix=stem, suffix=PARTIAL, dir=folder)
    os.close(handle)
    try:
        yield Path(partial)
    finally:
        Path(partial).unlink(missing_ok=True)


def written_here(partial: Path) -> bool:
    """Whether the process that staged it was one of this machine's."""
    host, _, pid = partial.name.rsplit(".", 2)[0].rpartition(".")
    return host.endswith(f".{socket.gethostname()}") and pid.isdigit()


def in_use(partial: Path, *, age_s: float) -> bool:
    """Whether a living process of this machine writes it."""
    pid = partial.name.rsplit(".", 3)[-3]
    return written_here(partial) and process_alive(int(pid)) and age_s < WRITTEN_WITHIN_S


def process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
