"""A folder that gets its name only when it is complete."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def published(final: Path) -> Iterator[Path]:
    """Yield a folder name beside `final`; what the block wrote there becomes `final` at its end.

    After an exception nothing is left. If another process has published `final` meanwhile, its
    folder stays: both hold the same content.
    """
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    try:
        yield partial
        for path in partial.rglob("*"):
            _flush(path)
        _flush(partial)
        try:
            partial.rename(final)
        except OSError:  # not empty: a rename replaces no folder with files in it
            if not final.is_dir():
                raise
        _flush(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have the disk hold a file or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
