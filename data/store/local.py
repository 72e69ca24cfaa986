"""A store in a local folder; a write is a temporary file, fsync, link or rename, fsync."""

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISLNK
from typing import BinaryIO, TypeVar

from semix.data.files import open_regular, read_bytes, require_regular, sync_folder
from semix.data.machine import DIGITS, machine
from semix.data.store.location import FileInfo, StoreLocation

PARTIAL = ".partial"
# If a file is older, the living process with the number in its name is not its writer.
WRITTEN_WITHIN_S = 24 * 3600.0
# .NAME.HOST-DIGEST.PROCESS.RANDOM.partial; names and hosts may have dots and dashes.
STAGED = re.compile(rf"(\..+\..+-[0-9a-f]{{{DIGITS}}})\.(\d{{1,9}})\.\w+\{PARTIAL}")
# As STAGED, for any machine, and for earlier versions, whose host names had no digest.
STAGED_BY_ANY = re.compile(rf"\..+\..+\.\d{{1,9}}\.\w+\{PARTIAL}")

READABLE_BY_ALL = 0o644  # temporary files are private, published ones are not

T = TypeVar("T")


class LocalFiles:
    """Files below one folder; see `semix.data.store.location.Backend`.

    The folder itself may be a link. Links to folders below it are not followed: they are not
    listed, and no file behind one is read, written or deleted. Links to files are followed.
    Pipes and devices do not count as files: they are not listed or opened.

    Raises:
        NotADirectoryError: from the methods, for a name in a folder that is such a link.
    """

    local = True
    shared = True
    parallel = 8  # network file systems answer several at a time

    def __init__(self, location: StoreLocation) -> None:
        self.url = location.url
        self._base = Path(location.base)

    def get(self, name: str, max_bytes: int) -> bytes:
        return read_bytes(self._path(name), max_bytes=max_bytes)

    def open(self, name: str) -> BinaryIO:
        return open_regular(self._path(name))

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def info(self, name: str) -> FileInfo:
        return _file_info(self._path(name).stat())

    def scan(self, folder: str, suffix: str = "") -> tuple[dict[str, FileInfo], list[str]]:
        return self._scan(folder, suffix, lambda entry: _file_info(entry.stat()))

    def names(self, folder: str) -> tuple[dict[str, None], list[str]]:
        return self._scan(folder, "", lambda entry: None)

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def put(self, name: str, content: bytes) -> None:
        with self.staging(name) as partial:
            partial.write_bytes(content)
            self.publish(partial, name)

    def create(self, name: str, content: bytes) -> bool:
        with self.staging(name) as partial:
            partial.write_bytes(content)
            _make_durable(partial)
            if not link(partial, self._base / name):
                return False
        sync_folder(partial.parent)
        return True

    @contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        target = self._path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged(target.parent, target.name) as partial:
            yield partial

    def publish(self, partial: Path, name: str) -> None:
        target = self._path(name)
        _make_durable(partial)
        partial.replace(target)
        sync_folder(partial.parent)

    def now(self) -> float:
        # On a network file system this is the server's clock, as for published files.
        with self.staging("clock") as partial:
            return partial.stat().st_mtime

    def partials(self) -> dict[str, FileInfo]:
        return {str(path.relative_to(self._base)): info for path, info in self._leftovers()}

    def sweep(self, *, before: float) -> int:
        count = 0
        for path, info in self._leftovers():
            if written_here(path) or info.modified < before:
                path.unlink(missing_ok=True)
                count += 1
        return count

    def refusal(self, error: OSError) -> str:
        reason = error.strerror or str(error)
        return f"cannot be written ({reason}); choose another place"

    def _leftovers(self) -> Iterator[tuple[Path, FileInfo]]:
        """Partial files that no living process of this machine writes."""
        partials = [
            Path(folder, file)
            for folder, _, files in os.walk(self._base)
            for file in files
            if is_ours(file)
        ]
        now = self.now() if partials else 0.0
        for path in sorted(partials):
            with suppress(FileNotFoundError):  # published or swept a moment ago
                info = _file_info(path.lstat())
                if not in_use(path, age_s=now - info.modified):
                    yield path, info

    def _scan(
        self, folder: str, suffix: str, value: Callable[[os.DirEntry[str]], T]
    ) -> tuple[dict[str, T], list[str]]:
        self._check_no_links(folder)
        start = f"{folder}/" if folder else ""
        files: dict[str, T] = {}
        folders: list[str] = []
        path = self._base / folder
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(start + entry.name)
                elif _is_published(entry, suffix):
                    with suppress(FileNotFoundError):  # deleted a moment ago
                        files[start + entry.name] = value(entry)
        return files, folders

    def _path(self, name: str) -> Path:
        self._check_no_links(name.rpartition("/")[0])
        return self._base / name

    def _check_no_links(self, folder: str) -> None:
        path = str(self._base)  # text, because this runs for every file
        for name in folder.split("/") if folder else ():
            path = f"{path}/{name}"
            if _is_link(path):
                reason = "a link to a folder is not followed inside a root; put the folder there"
                raise NotADirectoryError(errno.ENOTDIR, reason, path)


def link(partial: Path, target: Path) -> bool:
    """Link a complete file to its final name; False if that name is taken.

    A link is the one local operation that is both atomic and create-only.

    Raises:
        NoRegularFile: a pipe or a device has that name, and could not be read.
    """
    try:
        os.link(partial, target)
    except FileExistsError:
        require_regular(target)
        # A network file system may have linked, lost the answer, and tried again.
        return partial.stat().st_nlink == 2
    return True


def _is_link(path: str) -> bool:
    try:
        return S_ISLNK(os.lstat(path).st_mode)
    except OSError:  # no such file
        return False


def _is_published(entry: os.DirEntry[str], suffix: str) -> bool:
    """Whether it is a file of this suffix, or a link to one; only a link costs a disk access."""
    if not entry.name.endswith(suffix) or entry.name.endswith(PARTIAL):
        return False
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def _make_durable(path: Path) -> None:
    path.chmod(READABLE_BY_ALL)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _file_info(stat: os.stat_result) -> FileInfo:
    return FileInfo(stat.st_size, stat.st_mtime)


@contextmanager
def staged(folder: Path, name: str) -> Iterator[Path]:
    """A new file in `folder` whose name says which process writes it; removed at the end."""
    stem = f".{name}.{machine()}.{os.getpid()}."
    handle, partial = tempfile.mkstemp(prefix=stem, suffix=PARTIAL, dir=folder)
    os.close(handle)
    try:
        yield Path(partial)
    finally:
        Path(partial).unlink(missing_ok=True)


def is_ours(name: str) -> bool:
    """Whether a name is of the form that `staged` uses; other files are never removed."""
    return STAGED_BY_ANY.fullmatch(name) is not None


def written_here(partial: Path) -> bool:
    """Whether a process of this machine, by `machine()`, staged the file."""
    return _writer(partial) is not None


def in_use(partial: Path, *, age_s: float) -> bool:
    """Whether a living process of this machine writes the file."""
    pid = _writer(partial)
    return pid is not None and process_alive(pid) and age_s < WRITTEN_WITHIN_S


def abandoned(partial: Path, *, age_s: float) -> bool:
    """Whether the process that staged the file has ended.

    For other machines, containers, and this machine before a reboot, this is judged by the age.
    """
    if written_here(partial):
        return not in_use(partial, age_s=0.0)
    return STAGED.fullmatch(partial.name) is not None and age_s > WRITTEN_WITHIN_S


def _writer(partial: Path) -> int | None:
    """The number of the process that staged the file, if that was on this machine."""
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
