"""The shards of an index as open files: the tars of a local root, or verified copies of them."""

import errno
import fcntl
import hashlib
import io
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from semix.data.errors import InputError, TooLarge
from semix.data.files import read_bytes, write_atomically
from semix.data.formats import SeriesRecord, ShardEntry
from semix.data.machine import cache_folder
from semix.data.store import Store
from semix.data.strict_json import Strict
from semix.data.tar import SeriesSpans, scan_tar
from semix.data.tar_hashes import BLOCK, check_tar, sha256_of

CACHE_LIMIT = 50 * 2**30  # bytes of tars
MANIFESTS_DIVISOR = 8  # manifests may take an eighth of the limit for tars
MAX_MANIFEST = 2**30  # bytes; a manifest has a shard's records, and the offsets of its images
COPY, PARTIAL = ".tar", ".partial"
COPY_NAME = re.compile(rf"[0-9a-f]{{64}}\{COPY}|\.[0-9a-f]{{64}}\{PARTIAL}")
MANIFEST_NAME = re.compile(rf"[0-9a-f]{{64}}\.json|\.[0-9a-f]{{64}}\.json\.(\w+\.)?{PARTIAL[1:]}")
MAX_OPEN = {True: 128, False: 4}  # by `local`; an open copy takes disk space even if deleted


@dataclass(frozen=True)
class ShardContents:
    """The records of a shard, and where its images lie.

    Attributes:
        records: `KEY.json` of each of its g series.
        spans: int64 [g, A, 2], offset and size of each image in the tar.
    """

    records: list[SeriesRecord]
    spans: np.ndarray


class _Manifest(Strict):
    records: list[SeriesRecord]
    places: list[list[list[int]]]  # the spans


class Descriptor:
    """An open file that is closed when its last reader releases it."""

    def __init__(self, number: int) -> None:
        self.number = number
        close = weakref.finalize(self, os.close, number)
        close.atexit = False  # the system closes it, and `os` may be gone


class ShardFiles:
    """Reads bytes of the shards of an index: from a local root, or from copies in a cache.

    Args:
        shards: entries of an index.
        cache: the copies of remote shards; None for a local root.
    """

    def __init__(
        self, store: Store, shards: Sequence[ShardEntry], *, cache: "ShardCache | None"
    ) -> None:
        self.store, self.shards, self.cache = store, shards, cache
        self._reset()

    def contents(self, shard: int) -> ShardContents:
        """Records and spans of the shard at this position of the index.

        Raises:
            ValueError: the shard is damaged, missing, or not what its index says.
        """
        entry = self.shards[shard]
        contents = self.cache.read_manifest(entry) if self.cache else None
        if contents is None:
            contents = _read_contents(self._open_descriptor(shard).number, entry)
            if self.cache:
                self.cache.write_manifest(entry, contents)
        return contents

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Bytes of the shard at this position of the index."""
        # The local variable keeps the file open while other threads open more.
        descriptor = self._open_descriptor(shard)
        return os.pread(descriptor.number, size, offset)

    def fetch_again(self, shard: int) -> bool:
        """Drop a copy whose bytes are wrong, so that it is fetched again; False without a cache."""
        if self.cache is None:
            return False
        self.cache.forget(self.shards[shard])
        with self._lock:
            self._open.pop(shard, None)
        return True

    def _open_descriptor(self, shard: int) -> Descriptor:
        if self._process != os.getpid():
            self._reset()  # threads of the parent, which a fork does not copy, may hold the lock
        with self._lock:
            descriptor = self._open.get(shard)
            if descriptor is not None:
                self._open.move_to_end(shard)
                return descriptor
        descriptor = Descriptor(self._open_file(self.shards[shard]))
        with self._lock:
            self._open[shard] = descriptor
            while len(self._open) > MAX_OPEN[self.store.local]:
                self._open.popitem(last=False)
        return descriptor

    def _open_file(self, shard: ShardEntry) -> int:
        if self.cache is not None:
            return self.cache.open(shard, self.store)
        try:
            with self.store.open(shard.tar) as file:
                descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            raise ValueError(
                f"{shard.tar} is not in {self.store.url}; run `semix verify`"
            ) from None
        try:
            check_tar(descriptor, shard, path=f"{self.store.url}/{shard.tar}")
        except ValueError as error:
            os.close(descriptor)
            raise ValueError(f"{shard.tar}: {error}; run `semix verify --full`") from None
        return descriptor

    def _reset(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._open: OrderedDict[int, Descriptor] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ShardFiles, cache=self.cache), (self.store, self.shards)


class ShardCache:
    """Copies of tars, named by their hashes; the least recently used are removed first.

    A copy appears complete and verified, or not at all. If it was written to since, or has another
    size, it is verified again, and fetched again if it is damaged. A lock lets only one process
    fetch a shard. An open file stays readable if another process removes it.

    A manifest per shard has its contents, so that no shard is fetched for its records alone;
    opening the cache removes the least recently used manifests.

    Args:
        folder: `cache_folder()/shards` by default.
        limit: bytes of tars to keep; manifests may take an eighth of it in addition. The tar that
            was fetched last stays, even if it alone is larger; deleted files that processes still
            have open take space in addition.
    """

    def __init__(self, folder: Path | None = None, *, limit: int = CACHE_LIMIT) -> None:
        self.folder = folder or cache_folder() / "shards"
        self.limit = limit
        try:
            self._manifests.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from None
        manifests = (p for p in self._manifests.iterdir() if MANIFEST_NAME.fullmatch(p.name))
        _remove_oldest(manifests, limit=limit // MANIFESTS_DIVISOR)

    def open(self, shard: ShardEntry, store: Store) -> int:
        """A descriptor of the local copy, for `os.pread`; the caller closes it.

        Args:
            shard: entry of an index: tar, sha256 and bytes.
        Raises:
            ValueError: the tar is missing in the store, or is not the one in the index.
            InputError: the folder cannot be written.
        """
        descriptor = self._open_verified(shard)
        if descriptor is None:
            with self._lock(shard.sha256):
                descriptor = self._open_verified(shard)
                if descriptor is None:
                    descriptor = self._fetch(shard, store)
        return descriptor

    def forget(self, shard: ShardEntry) -> None:
        """Remove a copy, so that the shard is fetched again."""
        self._path(shard).unlink(missing_ok=True)

    def write_manifest(self, shard: ShardEntry, contents: ShardContents) -> None:
        """Store the contents of a shard.

        Raises:
            InputError: the folder cannot be written.
        """
        manifest = _Manifest(records=contents.records, places=contents.spans.tolist())
        content = manifest.model_dump_json(exclude_defaults=True).encode()
        digest = hashlib.sha256(content).hexdigest().encode()
        try:
            write_atomically(self._manifest_path(shard), digest + b"\n" + content)
        except OSError as error:
            raise self._unusable(error) from None

    def read_manifest(self, shard: ShardEntry) -> ShardContents | None:
        """The contents that `write_manifest` stored; None if they are missing or damaged."""
        path = self._manifest_path(shard)
        try:
            digest, _, text = read_bytes(path, max_bytes=MAX_MANIFEST).partition(b"\n")
            os.utime(path)
        except (FileNotFoundError, TooLarge):
            return None
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        try:
            manifest = _Manifest.model_validate_json(text)
        except ValueError:  # another version of semix wrote it
            return None
        return ShardContents(manifest.records, np.array(manifest.places, dtype=np.int64))

    @property
    def _manifests(self) -> Path:
        return self.folder / "contents"

    def _manifest_path(self, shard: ShardEntry) -> Path:
        return self._manifests / f"{shard.sha256}.json"

    def _path(self, shard: ShardEntry) -> Path:
        return self.folder / f"{shard.sha256}{COPY}"

    def _open_verified(self, shard: ShardEntry) -> int | None:
        try:
            descriptor = os.open(self._path(shard), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        state = os.fstat(descriptor)
        intact = state.st_size == shard.bytes
        if intact and state.st_mtime_ns != _mtime_tag(shard):
            intact = sha256_of(descriptor) == shard.sha256
        if not intact:
            os.close(descriptor)
            return None
        _touch(descriptor, shard)
        return descriptor

    def _fetch(self, shard: ShardEntry, store: Store) -> int:
        partial = self.folder / f".{shard.sha256}{PARTIAL}"
        try:
            self._make_room(shard.bytes)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(partial, flags, 0o644)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._download(shard, store, descriptor)
            _touch(descriptor, shard)
            partial.replace(self._path(shard))
            self._make_room(0, keep=self._path(shard))  # others may have fetched tars
        except BaseException:
            os.close(descriptor)
            partial.unlink(missing_ok=True)
            raise
        return descriptor

    def _download(self, shard: ShardEntry, store: Store, descriptor: int) -> None:
        digest, size = hashlib.sha256(), 0
        try:
            with store.open(shard.tar) as file:
                while (block := file.read(BLOCK)) and size <= shard.bytes:
                    digest.update(block)
                    size += len(block)
                    self._write(descriptor, block)
        except FileNotFoundError:
            raise ValueError(f"{shard.tar} is not in {store.url}; run `semix verify`") from None
        if (size, digest.hexdigest()) != (shard.bytes, shard.sha256):
            actual = f"{size:,} bytes" if size != shard.bytes else "another SHA-256"
            expected = f"{shard.bytes:,} bytes and SHA-256 {shard.sha256[:8]}"
            remedy = "run `semix verify`"
            raise ValueError(f"{shard.tar}: {actual}, its index says {expected}; {remedy}")

    def _write(self, descriptor: int, block: bytes) -> None:
        try:
            while block:
                block = block[os.write(descriptor, block) :]
        except OSError as error:
            raise self._unusable(error) from None

    def _make_room(self, extra: int, *, keep: Path | None = None) -> None:
        """Remove the least recently used copies, except `keep`, until `extra` more bytes fit."""
        copies = (path for path in self.folder.iterdir() if COPY_NAME.fullmatch(path.name))
        remaining = [path for path in copies if not self._remove_abandoned(path)]
        kept_paths = {keep, *(path for path in remaining if path.suffix == PARTIAL)}
        _remove_oldest(remaining, limit=self.limit - extra, keep=kept_paths)

    def _remove_abandoned(self, path: Path) -> bool:
        """Remove a partial copy that a killed process left; False if this is none."""
        if path.suffix != PARTIAL:
            return False
        try:
            with self._lock(path.name.lstrip("."), wait=False):
                path.unlink(missing_ok=True)
                return True
        except BlockingIOError:
            return False

    @contextmanager
    def _lock(self, sha256: str, *, wait: bool = True) -> Iterator[None]:
        """Lock one shard against all other threads and processes of this machine."""
        # 256 lock files, each for many shards, which are never removed: that would be a race.
        path = self.folder / f".{sha256[:2]}.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(lock)

    def _unusable(self, error: OSError) -> InputError:
        """The error for a folder that cannot be written."""
        reason = error.strerror or errno.errorcode.get(error.errno or 0, str(error))
        remedy = f"cannot be written ({reason}); name another folder by SEMIX_CACHE"
        return InputError("cache", self.folder, remedy)


def _remove_oldest(
    paths: Iterable[Path], *, limit: int, keep: Collection[Path | None] = ()
) -> None:
    """Remove files, the least recently used first, down to `limit` bytes; those in `keep` stay."""
    files = []
    for path in paths:
        with suppress(FileNotFoundError):  # another process removed it
            state = path.stat()
            files.append((state.st_atime_ns, state.st_size, path))
    used = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if used > limit and path not in keep:
            path.unlink(missing_ok=True)
            used -= size


def _mtime_tag(shard: ShardEntry) -> int:
    """The time of modification that marks a verified copy; writing to the file changes it."""
    return int(shard.sha256[:7], 16) * 10**9


def _touch(descriptor: int, shard: ShardEntry) -> None:
    """Mark a copy as verified, and as used now, by its two times."""
    os.utime(descriptor, ns=(time.time_ns(), _mtime_tag(shard)))


def _read_contents(descriptor: int, shard: ShardEntry) -> ShardContents:
    """Scan an open tar. Raises ValueError, with its name, if it is damaged or not this shard."""
    try:
        with io.FileIO(descriptor, closefd=False) as raw, io.BufferedReader(raw) as file:
            file.seek(0)
            series = list(scan_tar(file, max_bytes=shard.bytes))
        records = [_record(descriptor, spans) for spans in series]
        _check(series, shard)
    except ValueError as error:
        raise ValueError(f"{shard.tar}: {error}; run `semix verify`") from None
    return ShardContents(records, np.array([spans.images for spans in series], dtype=np.int64))


def _record(descriptor: int, series: SeriesSpans) -> SeriesRecord:
    record = SeriesRecord.read(os.pread(descriptor, series.record.size, series.record.offset))
    if record.group != series.group or len(record.alphas) != len(series.images):
        count = len(record.alphas)
        problem = f"record of group {record.group} with {count} alphas"
        raise ValueError(f"group {series.group} with {len(series.images)} images has the {problem}")
    return record


def _check(series: list[SeriesSpans], shard: ShardEntry) -> None:
    if len(series) != shard.groups:
        raise ValueError(f"{len(series)} groups, its index says {shard.groups}")
    for group, spans in zip(shard.group_numbers, series, strict=True):
        if spans.group != group:
            raise ValueError(f"holds group {spans.group} where {group} belongs")
        if (count := len(spans.images)) != (expected := len(series[0].images)):
            raise ValueError(f"group {group} has {count} images, the first group has {expected}")
