"""Store: files below a URL, with atomic and create-only writes. All writes to a root use it."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from semix.data.errors import InputError, TooLarge
from semix.data.machine import machine
from semix.data.store.local import PARTIAL, LocalFiles, process_alive
from semix.data.store.location import (
    PROTOCOLS,
    Backend,
    FileInfo,
    StoreLocation,
    check_folder,
    check_name,
    parse_url,
)

__all__ = ["MAX_BYTES", "PARTIAL", "PROTOCOLS", "FileInfo", "Store", "process_alive"]

T = TypeVar("T")

GIB = 2**30
MAX_BYTES = GIB  # of a file that is read at once; prototypes of 20,000 classes have half of it
BATCH = 64  # most names that a thread takes at a time
DAY_S = 24 * 3600.0
PROBE = "probe-"  # prefix of the temporary files of `check_writable`


class Store:
    """Named files below one URL. A name appears with its complete content or not at all.

    A store can be pickled, and used in forked and spawned processes and in threads. Transient
    faults (a busy or silent server, cut connections) are retried for about two minutes.

    Args:
        url: a local path, `file:///...`, `s3://BUCKET/...`, `gs://BUCKET/...`, or `memory://...`
            (this process only). Credentials, and the endpoint of an S3-compatible service
            (AWS_ENDPOINT_URL), come from the environment.
    Attributes:
        url: the URL in the form that is shown and stored.
        local: whether the store is a folder of this machine.
        shared: whether other processes see its files.
        parallel: number of requests that it answers at a time.
    Raises:
        InputError: another protocol, a chained URL, credentials or a query in it, a package that
            is not installed; with the first request, missing credentials or a missing bucket.
        ValueError: from the methods, a name that leads out of the store; from `get`, as TooLarge,
            a file of more than `max_bytes` bytes.
        OSError: from the methods, a fault that persists.
    """

    def __init__(self, url: str) -> None:
        self._location = parse_url(url)
        self._backend = _backend(self._location, persistent=True)
        self.url = self._backend.url
        self.local = self._backend.local
        self.shared = self._backend.shared
        self.parallel = self._backend.parallel

    def __reduce__(self) -> tuple[type["Store"], tuple[str]]:
        return type(self), (self.url,)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def get(self, name: str, *, max_bytes: int = MAX_BYTES) -> bytes:
        return self._backend.get(check_name(name), max_bytes)

    def get_many(self, names: Iterable[str], *, max_bytes: int = MAX_BYTES) -> dict[str, bytes]:
        """Contents by name, read in parallel; missing and too large files are left out."""
        checked = [check_name(name) for name in dict.fromkeys(names)]
        get = partial(self._backend.get, max_bytes=max_bytes)
        return read_many(get, checked, parallel=self._backend.parallel)

    def open(self, name: str) -> BinaryIO:
        """Open a file, read-only and seekable; an interrupted read resumes or raises."""
        return self._backend.open(check_name(name))

    def exists(self, name: str) -> bool:
        return self._backend.exists(check_name(name))

    def size(self, name: str) -> int:
        return self._backend.info(check_name(name)).bytes

    def scan(self, folder: str, *, suffix: str = "") -> tuple[dict[str, FileInfo], list[str]]:
        """Files directly in `folder` whose names end in `suffix`, and its sub-folders, by name."""
        files, folders = self._backend.scan(check_folder(folder), suffix)
        return dict(sorted(files.items())), sorted(folders)

    def list(self, folder: str) -> list[str]:
        """Names of all published files below `folder`, sorted; none if there is no such folder."""
        folder, backend = check_folder(folder), self._backend
        return list(walk(backend.names, folder, parallel=backend.parallel))

    def infos(self, folder: str) -> dict[str, FileInfo]:
        """Size and time of all published files below `folder`, sorted by name."""
        folder, backend = check_folder(folder), self._backend
        return walk(backend.scan, folder, parallel=backend.parallel)

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        self._backend.delete(check_name(name))

    def put(self, name: str, content: bytes) -> None:
        self._backend.put(check_name(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file only if its name is free, atomically among all writers; else False."""
        return self._backend.create(check_name(name), content)

    def staging(self, name: str) -> AbstractContextManager[Path]:
        """A local file to write for `name`: beside it in a local store, else a temporary file."""
        return self._backend.staging(check_name(name))

    def publish(self, partial: Path, name: str) -> None:
        """Give a complete staged file its final name, replacing a file with other content."""
        self._backend.publish(partial, check_name(name))

    def now(self) -> float:
        """The store's clock, UNIX seconds, so that ages do not depend on this machine's clock."""
        return self._backend.now()

    def partials(self) -> dict[str, FileInfo]:
        """Leftovers of unfinished writes, by name.

        They are partial files of a local store that no living process of this machine writes. In a
        bucket, uploads that were not completed are left to its lifecycle rule.
        """
        return self._backend.partials()

    def sweep(self, *, older_than_s: float = DAY_S) -> int:
        """Remove leftovers of killed local processes, and older partials; returns how many.

        Args:
            older_than_s: seconds since the last change, for files that may still be written:
                those of another machine.
        """
        return self._backend.sweep(before=self._backend.now() - older_than_s)

    def require_empty_or_own(self, kind: str, *, own: str = "", leftover: str = "") -> None:
        """Require that the location is empty, or holds something that was begun here before.

        Args:
            kind: the kind of folder to begin here, for the message.
            own: name of a file that shows that one was begun before; empty if there is none.
            leftover: name of a folder that an interrupted start leaves, which counts as nothing.
        Raises:
            InputError: foreign files or folders are here; hidden ones do not count.
        """
        try:
            files, folders = self._backend.names("")
        except OSError as error:
            raise InputError("out", self.url, self._backend.refusal(error)) from None
        names = sorted([*files, *folders])
        ignored = (".", PROBE)
        foreign = [n for n in names if not n.startswith(ignored) and n != leftover]
        if foreign and own not in names:
            shown = ", ".join(foreign[:3])
            if len(foreign) > 3:
                shown += f" and {len(foreign) - 3:,} more"
            remedy = f"holds {shown}, and is no {kind}; choose a new or an empty folder"
            raise InputError("out", self.url, remedy)

    def check_writable(self, *, tidy: bool = False) -> None:
        """Write, read, try to overwrite, and delete a small file, within seconds.

        Args:
            tidy: remove the folders that this created.
        Raises:
            InputError: one of these steps fails; the message says why, and what to do.
        """
        base = Path(self.url)
        new_folders = [p for p in (base, *base.parents) if not p.exists()] if self.local else []
        backend = _backend(self._location, persistent=False)
        try:
            _probe(backend)
        except OSError as error:
            raise InputError("out", self.url, backend.refusal(error)) from None
        for folder in new_folders if tidy else ():
            with suppress(OSError):  # another process has begun to write here
                folder.rmdir()


def _backend(location: StoreLocation, *, persistent: bool) -> Backend:
    if location.protocol == "file":
        return LocalFiles(location)
    # fsspec and the services' packages are imported only where they are needed.
    from semix.data.store.objects import ObjectStore
    from semix.data.store.services import DEFAULT_RETRIES, QUICK_RETRIES

    return ObjectStore(location, policy=DEFAULT_RETRIES if persistent else QUICK_RETRIES)


def _probe(backend: Backend) -> None:
    name = f"{PROBE}{machine()}-{os.getpid()}"
    backend.put(name, b"semix")
    if backend.get(name, MAX_BYTES) != b"semix":
        raise OSError("it returns other bytes than were written")
    # Some S3-compatible servers do not know If-None-Match and overwrite.
    is_create_only = not backend.create(name, b"other") and backend.get(name, MAX_BYTES) == b"semix"
    backend.delete(name)
    if not is_create_only:
        raise OSError("it overwrites a file on a create-only write")


def walk(
    scan: Callable[[str], tuple[dict[str, T], Sequence[str]]], folder: str, *, parallel: int
) -> dict[str, T]:
    """All files below a folder, sorted by name; lists one level of folders at a time."""
    all_files: dict[str, T] = {}
    folders: list[str] = [folder]
    with _threads(parallel) as pool:
        while folders:
            subfolders: list[str] = []
            for files, inner in pool.map(scan, folders):
                all_files.update(files)
                subfolders.extend(inner)
            folders = subfolders
    return dict(sorted(all_files.items()))


def read_many(
    get: Callable[[str], bytes], names: Sequence[str], *, parallel: int
) -> dict[str, bytes]:
    """Contents by name, in the given order; missing and too large files are left out."""

    def read(batch: Sequence[str]) -> list[tuple[str, bytes]]:
        contents = []
        for name in batch:
            try:
                contents.append((name, get(name)))
            except (FileNotFoundError, TooLarge):
                continue
        return contents

    size = min(BATCH, -(-len(names) // parallel)) or 1
    batches = [names[start : start + size] for start in range(0, len(names), size)]
    with _threads(parallel) as pool:
        return dict(item for batch in pool.map(read, batches) for item in batch)


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)  # after an error no further result is needed
