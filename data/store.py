"""One root at one URL: atomic put, create-only put, list. The only code that publishes bytes."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import fsspec

from data.errors import InputError
from data.files import READABLE_BY_ALL, sync_folder

PROTOCOLS = ("file", "memory")
PARTIAL = ".partial"


class Store:
    """Named files below one URL. A name appears with its complete content or not at all.

    fsspec's own `open(..., "wb")` publishes what was written so far when the block raises, so
    it is used for reading only.

    Args:
        url: a local path, `file://...`, or `memory://...` (this process only).
    Raises:
        InputError: another protocol, or a chained URL.
    """

    def __init__(self, url: str) -> None:
        protocol, _, path = url.rpartition("://") if "://" in url else ("file", "", url)
        if protocol not in PROTOCOLS or "::" in url:
            raise InputError("url", url, f"use one of {', '.join(PROTOCOLS)}")
        self.local = protocol == "file"
        self.url = str(Path(path).absolute()) if self.local else url
        self._fs = fsspec.filesystem(protocol)
        self._base = self.url if self.local else path.rstrip("/")

    def get(self, name: str) -> bytes:
        return self._fs.cat_file(self._path(name))

    def open(self, name: str) -> BinaryIO:
        return self._fs.open(self._path(name), "rb")

    def exists(self, name: str) -> bool:
        return self._fs.exists(self._path(name))

    def size(self, name: str) -> int:
        return self._fs.size(self._path(name))

    def list(self, folder: str) -> list[str]:
        """Names of all published files below `folder`, sorted; none if it is not there."""
        found = self._fs.find(self._path(folder))
        names = (path[len(self._base) :].lstrip("/") for path in found)
        return sorted(name for name in names if not name.endswith(PARTIAL))

    def delete(self, name: str) -> None:
        self._fs.rm_file(self._path(name))

    def put(self, name: str, content: bytes) -> None:
        with self.staging(name) as partial:
            partial.write_bytes(content)
            self.publish(partial, name)

    def create(self, name: str, content: bytes) -> bool:
        """Put only if the name is free; False if it was taken, by anyone, at any moment."""
        if not self.local:
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            return True
        with self.staging(name) as partial:
            partial.write_bytes(content)
            _complete(partial)
            try:
                # A link is the one local operation that is both complete and create-only.
                os.link(partial, self._path(name))
            except FileExistsError:
                return False
        sync_folder(partial.parent)
        return True

    @contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        """A local file to fill for `name`: beside its target if that is local, else temporary."""
        folder = Path(self._path(name)).parent if self.local else Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        stem = f".{Path(name).name}.{socket.gethostname()}.{os.getpid()}."
        handle, partial = tempfile.mkstemp(prefix=stem, suffix=PARTIAL, dir=folder)
        os.close(handle)
        try:
            yield Path(partial)
        finally:
            Path(partial).unlink(missing_ok=True)

    def publish(self, partial: Path, name: str) -> None:
        """Give a complete staged file its final name, replacing what was there."""
        if not self.local:
            self._fs.put_file(str(partial), self._path(name))
            return
        _complete(partial)
        partial.replace(self._path(name))
        sync_folder(partial.parent)

    def sweep(self) -> int:
        """Remove staged files that killed processes of this machine left; how many."""
        if not self.local:
            return 0
        left = [path for path in Path(self._base).rglob(f".*{PARTIAL}") if not _in_use(path)]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    def check_writable(self, *, tidy: bool = False) -> None:
        """Raises InputError, with the system's reason, if nothing can be written here.

        Args:
            tidy: remove the folders again that had to be made.
        """
        probe = f"probe-{socket.gethostname()}-{os.getpid()}"
        place = Path(self.url)
        made = [p for p in (place, *place.parents) if not p.exists()] if self.local else []
        try:
            self.put(probe, b"semix")
            self.delete(probe)
            for folder in made if tidy else ():
                with suppress(OSError):  # another process has begun to write here
                    folder.rmdir()
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(
                "out", self.url, f"cannot be written ({reason}); choose another place"
            ) from None

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"


def process_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _in_use(partial: Path) -> bool:
    host, _, pid = partial.name.rsplit(".", 2)[0].rpartition(".")
    if not host.endswith(f".{socket.gethostname()}") or not pid.isdigit():
        return True  # another machine's; only that machine knows whether it still writes
    return process_alive(int(pid))


def _complete(path: Path) -> None:
    path.chmod(READABLE_BY_ALL)
    with path.open("rb") as file:
        os.fsync(file.fileno())
