"""Local files and folders: atomic writes, bounded reads, checks for links to other folders."""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from semix.data.errors import InputError, TooLarge

MAX_JSON = 256 * 2**20  # bytes; the largest, a lineage over a million shards, has a hundred MiB
MAX_TENSORS = 16 * 2**30  # bytes; a billion parameters with Adam's state have twelve GiB
# Folders in which an experiment tracker keeps its own links; semix writes nothing there.
TRACKERS = ("wandb",)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def add_path_to_disk_errors(path: Path) -> Iterator[None]:
    """Add the path to an error of a full disk, which lacks it after a write to an open file."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A path beside `target` for a file or a folder, which becomes `target` at the end.

    A crash at any moment leaves either the old or the new content; an exception leaves nothing
    behind. If another process published a folder meanwhile, that one stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with add_path_to_disk_errors(target):
            yield partial
            # The contents of all files reach the disk before their names do.
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
            remove_tree(partial)
        else:
            partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, atomically."""
    with published(path) as partial:
        partial.write_bytes(content)


def sync_folder(folder: Path) -> None:
    """Flush a folder, or a file, to disk, so that renames and writes survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its content; what cannot be removed stays, and only takes space.

    If `folder` is a link, neither it nor its target is removed; targets of links inside stay.
    """
    shutil.rmtree(folder, ignore_errors=True)


def require_own_files(field: str, folder: Path) -> None:
    """Require that all entries below a folder are regular files and folders.

    The folder may come from elsewhere: writes and removals would follow a link in it to another
    folder, and reading a pipe would never end. The folder itself may be a link. Folders of
    `TRACKERS` are not searched.

    Args:
        field: the setting or argument that names the folder, for the message.
    Raises:
        InputError: names the first entry that is neither.
    """
    for entry in _entries(folder):
        if entry.is_symlink():
            require_no_link(field, Path(entry.path))
        if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
            remedy = "is neither a file nor a folder (a pipe or a device); remove it"
            raise InputError(field, entry.path, remedy)


def require_no_link(field: str, path: Path) -> None:
    """Raises InputError for a link to a file or a folder, or a dangling one."""
    if path.is_symlink():
        remedy = "is a link, and links are not followed here; replace it by its target"
        raise InputError(field, path, remedy)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All entries below a folder; none of a missing or unreadable folder."""
    folders = [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        yield from children
        subfolders = [entry for entry in children if entry.is_dir(follow_symlinks=False)]
        folders += [entry.path for entry in subfolders if entry.name not in TRACKERS]


class NoRegularFile(FileNotFoundError):
    """A path is a pipe or a device, not a regular file."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(f"{path} is no regular file")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Pipes and devices are not opened: a pipe without a writer would block, some devices never end.

    Raises:
        NoRegularFile: it is a pipe or a device.
        OSError: as `open`, also for a folder.
    """
    return open(path, "rb", opener=_open_descriptor)


def require_regular(path: Path) -> None:
    """Raises NoRegularFile for a pipe or a device, but not for a folder or a missing path."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise NoRegularFile(path)


def _open_descriptor(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if S_ISREG(mode) or S_ISDIR(mode):  # `open` itself raises for a folder
        return descriptor
    os.close(descriptor)
    raise NoRegularFile(path)


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """The content of a regular file, whose size is checked first.

    Raises:
        NoRegularFile: it is a pipe or a device.
        TooLarge: it has more than `max_bytes` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise TooLarge.for_file(path, size, max_bytes)
        return file.read(size)


def check_size(path: Path, *, max_bytes: int) -> None:
    """Raises TooLarge for a file of more than `max_bytes` bytes, before a library reads it."""
    size = path.stat().st_size
    if size > max_bytes:
        raise TooLarge.for_file(path, size, max_bytes)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises TooLarge for more than `MAX_JSON` bytes."""
    return json.loads(read_bytes(path, max_bytes=MAX_JSON))


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text.encode() + b"\n")
