"""A store of objects in s3, gs or memory, through fsspec; transient faults are retried."""

import hashlib
import io
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from fsspec import AbstractFileSystem

from semix.data.errors import InputError, TooLarge
from semix.data.installation import install_command
from semix.data.store.local import PARTIAL, abandoned, staged
from semix.data.store.location import FileInfo, StoreLocation
from semix.data.store.services import Info, InMemoryService, RetryPolicy, Service, retrying

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

PART = 16 << 20  # bytes of a part of an upload; files of twice that have several parts
PARTS_AT_A_TIME = 4
MAX_PARTS = 10_000
FIRST_RANGE = 1 << 18  # bytes; small, so that a single image is read without its shard
MAX_RANGE = 1 << 23


class ObjectStore:
    """Objects below bucket/prefix; see `semix.data.store.location.Backend`.

    Objects are written at once, and read in ranges: fsspec's own `open(..., "wb")` would publish
    an incomplete object when the block raises.

    Raises:
        InputError: the package for this service is not installed.
    """

    local = False
    parallel = 16

    def __init__(self, location: StoreLocation, *, policy: RetryPolicy) -> None:
        self.url = location.url
        self._bucket_path = location.base
        self._connection = Connection(location, policy)
        self._service = self._connection.service
        self._run, self._path = self._connection.run, self._connection.path
        self.shared = self._service.SHARED

    def get(self, name: str, max_bytes: int) -> bytes:
        # A single request for one byte more than is allowed, which shows whether there are more.
        try:
            content = self._run(
                name, lambda fs: fs.cat_file(self._path(name), start=0, end=max_bytes + 1)
            )
        except FileNotFoundError:
            raise
        except OSError:
            if self.info(name).bytes:
                raise
            return b""  # an empty object has no range
        if len(content) > max_bytes:
            raise TooLarge.for_file(f"{self.url}/{name}", self.info(name).bytes, max_bytes)
        return content

    def open(self, name: str) -> BinaryIO:
        def read(start: int, end: int) -> bytes:
            return self._run(name, lambda fs: _read_range(fs, self._path(name), start, end))

        return io.BufferedReader(RangeFile(read, self.info(name).bytes))

    def exists(self, name: str) -> bool:
        try:
            self._raw_info(name)
        except FileNotFoundError:
            return False
        return True

    def info(self, name: str) -> FileInfo:
        info = self._raw_info(name)
        if info["type"] != "file":
            raise IsADirectoryError(name)
        return self._file_info(info)

    def scan(self, folder: str, suffix: str = "") -> tuple[dict[str, FileInfo], list[str]]:
        try:
            infos = self._run(folder, lambda fs: fs.ls(self._path(folder), detail=True))
        except FileNotFoundError:
            return {}, []
        bucket_path = self._bucket_path.strip("/")
        files, folders = {}, []
        for info in infos:
            name = info["name"].lstrip("/").removeprefix(bucket_path).strip("/")
            if info["type"] == "directory":
                folders.append(name)
            elif not name.endswith(suffix) or name.endswith(PARTIAL):
                continue
            elif name != folder:  # some tools create an object for a folder
                files[name] = self._file_info(info)
        return files, folders

    def names(self, folder: str) -> tuple[dict[str, None], list[str]]:
        files, folders = self.scan(folder)
        return dict.fromkeys(files), folders

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._run(name, lambda fs: fs.rm_file(self._path(name)))

    def put(self, name: str, content: bytes) -> None:
        self._run(name, lambda fs: fs.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        writer_id = secrets.token_hex(8)
        options = self._service.writer_options(writer_id)
        try:
            self._run(
                name, lambda fs: fs.pipe_file(self._path(name), content, mode="create", **options)
            )
        except FileExistsError:
            return self._is_written_by(writer_id, name)
        return True

    @contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        with staged(Path(tempfile.gettempdir()), Path(name).name) as partial:
            yield partial

    def publish(self, partial: Path, name: str) -> None:
        writer_id = secrets.token_hex(8)
        try:
            self._put_file(partial, name, mode="create", **self._service.writer_options(writer_id))
        except FileExistsError:
            # The hash in the name shows that this is the content, unless it is damaged.
            if not self._is_written_by(writer_id, name) and not self._is_copy(partial, name):
                self._put_file(partial, name, mode="overwrite")

    def now(self) -> float:
        return self._run("", lambda fs: self._service.now(fs, self._bucket_path))

    def partials(self) -> dict[str, FileInfo]:
        return {}  # uploads that were not completed are left to the bucket's lifecycle rule

    def sweep(self, *, before: float) -> int:
        return _sweep_staged()

    def refusal(self, error: OSError) -> str:
        reason = error.strerror or str(error)
        if isinstance(error, PermissionError):
            return f"may not be written ({reason}); allow it, or choose another place"
        if isinstance(error, FileNotFoundError):
            return "there is no such bucket; create it, or correct its name"
        at = self._service.address()
        return f"cannot be used at {at} ({reason}); correct the address or choose another place"

    def _raw_info(self, name: str) -> Info:
        path = self._path(name)
        try:
            return self._run(name, lambda fs: fs.info(path))
        except PermissionError:
            # The answer to a read, unlike this one, has a body that says why access was refused.
            self._run(name, lambda fs: fs.cat_file(path, start=0, end=1))
            raise

    def _put_file(self, partial: Path, name: str, **arguments: Any) -> None:
        part_bytes = max(PART, -(-partial.stat().st_size // MAX_PARTS))
        arguments |= {"chunksize": part_bytes, "max_concurrency": PARTS_AT_A_TIME}
        self._run(name, lambda fs: fs.put_file(str(partial), self._path(name), **arguments))

    def _is_written_by(self, writer_id: str, name: str) -> bool:
        """Whether an earlier attempt of this call wrote the object, and its answer was lost."""
        try:
            stored = self._run(name, lambda fs: self._service.writer_id_of(fs, self._path(name)))
        except FileNotFoundError:
            return False
        return stored == writer_id

    def _is_copy(self, partial: Path, name: str) -> bool:
        if self.info(name).bytes != partial.stat().st_size:
            return False
        with partial.open("rb") as local_file, self.open(name) as stored_file:
            return (
                hashlib.file_digest(local_file, "sha256").digest()
                == hashlib.file_digest(stored_file, "sha256").digest()  # type: ignore[arg-type]
            )

    def _file_info(self, info: Info) -> FileInfo:
        return FileInfo(info["size"], self._service.modified_time(info))


class Connection:
    """Access to bucket/prefix of one service, from any process and thread.

    Attributes:
        service: the functions that differ between services.
    Raises:
        InputError: the package for this service is not installed.
    """

    def __init__(self, location: StoreLocation, policy: RetryPolicy) -> None:
        self.url, self.bucket_path = location.url, location.base
        self.service = service_of(location.protocol, location.url)
        self._policy = policy
        # By process, because connections and fsspec's loop do not survive a fork. A child keeps
        # the entry of its parent, because it must not close the connections they share.
        self._connected: dict[int, AbstractFileSystem] = {}

    def run(self, name: str, operation: Callable[[AbstractFileSystem], T]) -> T:
        """The result of the operation, which is retried; its errors are translated."""
        where = f"{self.url}/{name}" if name else self.url
        try:
            return retrying(
                lambda: operation(self._file_system()),
                what=where,
                transient_reason=self.service.transient_reason,
                policy=self._policy,
            )
        except Exception as error:
            raise self.service.translate_error(error, self.url, where) from None

    def path(self, name: str) -> str:
        return f"{self.bucket_path}/{name}" if name else self.bucket_path

    def _file_system(self) -> AbstractFileSystem:
        pid = os.getpid()
        if pid not in self._connected:
            self._connected.setdefault(pid, self.service.connect(self._policy))
        return self._connected[pid]


class RangeFile(io.RawIOBase):
    """An object as a read-only, seekable file, which ends only where the object ends.

    Args:
        read: function that returns all bytes [start, end) of the object.
        size: bytes of the object.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size = read, size
        self._position = 0
        self._start, self._bytes = 0, b""  # of the last range
        self._length = FIRST_RANGE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset} is before the file")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        if self._position >= self._size:
            return 0
        end = self._start + len(self._bytes)
        if not self._start <= self._position < end:
            # Sequential reads use ever longer ranges, random reads short ranges.
            is_sequential = self._position == end and end > 0
            self._length = min(2 * self._length, MAX_RANGE) if is_sequential else FIRST_RANGE
            self._start = self._position
            self._bytes = self._read(self._start, min(self._start + self._length, self._size))
        start, view = self._position - self._start, memoryview(buffer).cast("B")
        chunk = self._bytes[start : start + len(view)]
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)


def _read_range(fs: AbstractFileSystem, path: str, start: int, end: int) -> bytes:
    content = fs.cat_file(path, start=start, end=end)
    if len(content) != end - start:
        raise ConnectionError(f"{len(content)} bytes of {end - start}")
    return content


def _sweep_staged() -> int:
    """Remove files that dead processes of this machine staged in its temporary folder."""
    folder, count = Path(tempfile.gettempdir()), 0
    for path in folder.glob(f".*{PARTIAL}"):
        with suppress(OSError):  # a file of another user, or just removed
            if abandoned(path, age_s=time.time() - path.stat().st_mtime):
                path.unlink()
                count += 1
    return count


def service_of(protocol: str, url: str) -> Service:
    """The module of a service.

    Raises:
        InputError: the package that it needs is not installed.
    """
    try:
        if protocol == "s3":
            from semix.data.store import s3

            return s3
        if protocol == "gs":
            from semix.data.store import gs

            return gs
    except ModuleNotFoundError:
        package = {"s3": "s3fs", "gs": "gcsfs"}[protocol]
        remedy = f"needs {package}: {install_command(protocol)}"
        raise InputError("url", url, remedy) from None
    return InMemoryService()
