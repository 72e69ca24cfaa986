"""Local files and folders that appear whole or not at all, and lead nowhere else."""

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

MOST_JSON = 256 * 2**20  # bytes; the largest, a lineage over a million shards, has a hundred MiB
MOST_TENSORS = 16 * 2**30  # bytes; a billion parameters with Adam's state have twelve GiB
# Folders in which a tracker of trainings keeps links of its own; nothing of ours is written there.
TRACKERS = ("wandb",)
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
            remove_tree(partial)
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


def remove_tree(folder: Path) -> None:
    """Remove a folder with all in it; what cannot be removed stays, and costs room alone.

    A link is no folder: neither it nor what it leads to is removed, and of links inside the
    folder only the links are.
    """
    shutil.rmtree(folder, ignore_errors=True)


def require_own_files(field: str, folder: Path) -> None:
    """Let only a folder be written to in which every entry is a folder or a file of its own.

    Such a folder may come from elsewhere: a link in it would lead what is written or removed to
    another place, and a pipe would be waited for without end. The folder itself may be a link.
    What lies in a folder of `TRACKERS` is not looked at.

    Args:
        field: that names the folder, for the message.
    Raises:
        InputError: names the first entry that is something else.
    """
    for entry in _entries(folder):
        if entry.is_symlink():
            require_no_link(field, Path(entry.path))
        if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
            remedy = "is neither a file nor a folder (a pipe or a device); remove it"
            raise InputError(field, entry.path, remedy)


def require_no_link(field: str, path: Path) -> None:
    """Raises InputError for a link, to a file, a folder or nothing."""
    if path.is_symlink():
        remedy = "is a link, and none is followed here; put in its place what it leads to"
        raise InputError(field, path, remedy)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All that lies below a folder; none where there is no folder, or one that cannot be read."""
    folders = [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        yield from listed
        below = [entry for entry in listed if entry.is_dir(follow_symlinks=False)]
        folders += [entry.path for entry in below if entry.name not in TRACKERS]


class NoRegularFile(FileNotFoundError):
    """There is something else by the name of a file: a pipe, or a device."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(f"{path} is no regular file")


def open_regular(path: Path) -> BufferedReader:
    """A regular file, or what a link to one leads to, for reading.

    Of a pipe nobody may write the other end, and some devices never end: neither is waited for.

    Raises:
        NoRegularFile: it is something else.
        OSError: as `open`, which refuses folders.
    """
    return open(path, "rb", opener=_regular)


def require_regular(path: Path) -> None:
    """Raises NoRegularFile where there is a pipe or a device; nothing, or a folder, is let be."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise NoRegularFile(path)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if S_ISREG(mode) or S_ISDIR(mode):  # `open` itself refuses a folder
        return descriptor
    os.close(descriptor)
    raise NoRegularFile(path)


def read_bytes(path: Path, *, most: int) -> bytes:
    """The content of a regular file, whose size is looked at first.

    Raises:
        NoRegularFile: it is a pipe or a device.
        TooLarge: it has more than `most` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise TooLarge.refused(path, size, most)
        return file.read(size)


def refuse_larger(path: Path, *, most: int) -> None:
    """Raises TooLarge, of a file with more than `most` bytes that a library is about to read."""
    size = path.stat().st_size
    if size > most:
        raise TooLarge.refused(path, size, most)


def read_json(path: Path) -> Any:
    """Raises TooLarge, of more than any JSON of ours has."""
    return json.loads(read_bytes(path, most=MOST_JSON))


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text.encode() + b"\n")
