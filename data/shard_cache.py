"""Local copies of remote shards: verified, limited in size, shared by several processes."""

import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.cache_folder import cache_folder
from data.errors import InputError
from data.store import Store

CACHE_LIMIT = 50 * 2**30  # bytes of tars
BLOCK = 8 * 2**20  # bytes read at a time
COPY, PARTIAL = ".tar", ".partial"
OURS = re.compile(rf"[0-9a-f]{{64}}\{COPY}|\.[0-9a-f]{{64}}\{PARTIAL}")


class ShardCache:
    """Copies of tars under their hashes, the least recently used removed first.

    A copy appears whole and verified or not at all. One that was written to since, or has
    another size, is verified anew and fetched again where it is damaged. Processes take turns
    to fetch a shard; one may remove what another still reads, because an open file lives on.

    Args:
        folder: `cache_folder()/shards` by default.
        limit: bytes of tars to keep. The one that was fetched last stays, even if it alone is
            larger; what processes still have open keeps its room on the disk besides.
    """

    def __init__(self, folder: Path | None = None, *, limit: int = CACHE_LIMIT) -> None:
        self.folder = folder or cache_folder() / "shards"
        self.limit = limit
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.unusable(error) from None

    def open(self, shard: Mapping[str, Any], store: Store) -> int:
        """A descriptor of the local copy, for `os.pread`; the caller closes it.

        Args:
            shard: entry of an index: tar, sha256 and bytes.
        Raises:
            ValueError: the store holds something else than the index says, or nothing.
            InputError: the folder cannot be written.
        """
        found = self._verified(shard)
        if found is None:
            with self._turn(shard["sha256"]):
                found = self._verified(shard)
                if found is None:
                    found = self._fetched(shard, store)
        return found

    def forget(self, shard: Mapping[str, Any]) -> None:
        """Remove a copy, so that it is fetched again."""
        self._path(shard).unlink(missing_ok=True)

    def _path(self, shard: Mapping[str, Any]) -> Path:
        return self.folder / f"{shard['sha256']}{COPY}"

    def _verified(self, shard: Mapping[str, Any]) -> int | None:
        try:
            descriptor = os.open(self._path(shard), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        state = os.fstat(descriptor)
        whole = state.st_size == shard["bytes"]
        if whole and state.st_mtime_ns != _mark(shard):
            whole = _sha256(descriptor) == shard["sha256"]
        if not whole:
            os.close(descriptor)
            return None
        _stamp(descriptor, shard)
        return descriptor

    def _fetched(self, shard: Mapping[str, Any], store: Store) -> int:
        partial = self.folder / f".{shard['sha256']}{PARTIAL}"
        try:
            self._make_room(shard["bytes"])
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self.unusable(error) from None
        try:
            self._download(shard, store, descriptor)
            _stamp(descriptor, shard)
            partial.replace(self._path(shard))
            self._make_room(0, keep=self._path(shard))  # others fetched meanwhile
        except BaseException:
            os.close(descriptor)
            partial.unlink(missing_ok=True)
            raise
        return descriptor

    def _download(self, shard: Mapping[str, Any], store: Store, descriptor: int) -> None:
        digest, size = hashlib.sha256(), 0
        try:
            with store.open(shard["tar"]) as source:
                while (block := source.read(BLOCK)) and size <= shard["bytes"]:
                    digest.update(block)
                    size += len(block)
                    self._write(descriptor, block)
        except FileNotFoundError:
            raise ValueError(f"{shard['tar']} is not in {store.url}; run `semix verify`") from None
        if (size, digest.hexdigest()) != (shard["bytes"], shard["sha256"]):
            found = f"{size:,} bytes" if size != shard["bytes"] else "another SHA-256"
            wanted = f"{shard['bytes']:,} bytes and SHA-256 {shard['sha256'][:8]}"
            remedy = "run `semix verify`"
            raise ValueError(f"{shard['tar']}: {found}, its index says {wanted}; {remedy}")

    def _write(self, descriptor: int, block: bytes) -> None:
        try:
            while block:
                block = block[os.write(descriptor, block) :]
        except OSError as error:
            raise self.unusable(error) from None

    def _make_room(self, wanted: int, *, keep: Path | None = None) -> None:
        """Remove the least recently used copies, but not `keep`, until `wanted` bytes fit."""
        copies: list[tuple[int, int, Path]] = []
        used = wanted
        for path in self.folder.iterdir():
            if not OURS.fullmatch(path.name) or self._removed_as_left(path):
                continue
            with suppress(FileNotFoundError):  # another process makes room as well
                state = path.stat()
                used += state.st_size
                if path.suffix == COPY and path != keep:
                    copies.append((state.st_atime_ns, state.st_size, path))
        for _, size, path in sorted(copies):
            if used <= self.limit:
                break
            path.unlink(missing_ok=True)
            used -= size

    def _removed_as_left(self, path: Path) -> bool:
        """Whether a killed process had left this, and it is gone now."""
        if path.suffix != PARTIAL:
            return False
        try:
            with self._turn(path.name.lstrip("."), wait=False):
                path.unlink(missing_ok=True)
                return True
        except BlockingIOError:
            return False

    @contextmanager
    def _turn(self, sha256: str, *, wait: bool = True) -> Iterator[None]:
        """Alone with one shard, over all threads and processes of this machine."""
        # One of 256 files stands for a shard: they are never removed, which would be a race.
        path = self.folder / f".{sha256[:2]}.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self.unusable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(lock)

    def unusable(self, error: OSError) -> InputError:
        """What to raise where the folder cannot be written."""
        reason = error.strerror or errno.errorcode.get(error.errno or 0, str(error))
        remedy = f"cannot be written ({reason}); name another folder by SEMIX_CACHE"
        return InputError("cache", self.folder, remedy)


def _mark(shard: Mapping[str, Any]) -> int:
    """The time of modification of a verified copy; whatever writes to it changes that."""
    return int(shard["sha256"][:7], 16) * 10**9


def _stamp(descriptor: int, shard: Mapping[str, Any]) -> None:
    """Note that the copy is verified, and used now."""
    os.utime(descriptor, ns=(time.time_ns(), _mark(shard)))


def _sha256(descriptor: int) -> str:
    digest, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, BLOCK, offset):
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()
