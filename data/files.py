"""Local files and folders that appear whole or not at all."""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def full_disk_named(place: Path) -> Iterator[None]:
    """A disk that is full says for which place, which the writing of an open file does not."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(place)
        raise


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to, as file or folder; it becomes `target` at the end.

    A crash at any moment leaves what was there or what is new; after an exception nothing is
    left. A folder that another process published meanwhile stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with full_disk_named(target):
            yield partial
            # The bytes of all files reach the disk before their names do.
            for path in (partial, *partial.rglob("*")):
                sync_folder(path)
        try:
            partial.replace(target)
        except OSError:  # a rename replaces no folder with files in it
            if not (partial.is_dir() and target.is_dir()):
                raise
        sync_folder(target.parent)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Give `path` this content."""
    with published(path) as partial:
        partial.write_bytes(content)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder`, or what was written to a file, survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text.encode() + b"\n")
