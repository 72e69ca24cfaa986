"""A file or folder that appears under its name when it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import InputError
from data.files import sync_folder


@contextmanager
def new_target(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to, as file or folder; it becomes `target` at the end.

    Raises:
        InputError: something is there already.
    """
    _refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        yield partial
        _sync(partial)
        _refuse_existing(target)
        partial.rename(target)
    except BaseException:
        _remove(partial)
        raise
    sync_folder(target.parent)


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise InputError("--to", target, "is there already; choose another name, or remove it")


def _sync(partial: Path) -> None:
    """The bytes of all files reach the disk before their names do."""
    for path in (partial, *partial.rglob("*")):
        sync_folder(path)  # a descriptor of either kind


def _remove(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)
