"""Check of local tars against their records; each tar is hashed once per machine."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from semix.data.fingerprint import fingerprint
from semix.data.formats import ShardEntry
from semix.data.machine import cache_folder

BLOCK = 8 * 2**20  # bytes read at a time
FOLDER = "hashed-tars"  # in the cache: one empty marker file per verified tar
LOCK = ".lock"
MAX_MARKERS = 4096  # in each of 256 folders: enough for a million tars

log = logging.getLogger("semix.root")
_verified_markers: set[str] = set()  # markers of this process, whose cache may not be writable


def check_tar(descriptor: int, shard: ShardEntry, *, path: str) -> None:
    """Hash an open local tar, unless it was hashed before with this size and time.

    A lock lets only one process hash a tar, for all of them.

    Args:
        shard: entry of an index, or a commit record.
        path: path of the tar.
    Raises:
        ValueError: it does not have the recorded size and SHA-256.
    """
    state = os.fstat(descriptor)
    if state.st_size != shard.bytes:
        raise ValueError(f"{state.st_size:,} bytes, its record says {shard.bytes:,}")
    marker = fingerprint([path, shard.sha256, state.st_size, state.st_mtime_ns])
    marker_path = cache_folder() / FOLDER / marker[:2] / marker
    if marker in _verified_markers or marker_path.exists():
        return
    with _lock(marker_path) as writable:
        if not marker_path.exists():
            if sha256_of(descriptor) != shard.sha256:
                raise ValueError("does not have the recorded SHA-256")
            if writable:
                _remember(marker_path)
    _verified_markers.add(marker)


def sha256_of(descriptor: int) -> str:
    """SHA-256 of an open file, from its beginning, whatever its position."""
    digest, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, BLOCK, offset):
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Lock the tars of a folder of markers; yields False if the cache cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if not _verified_markers:  # warn once
            reason = error.strerror or str(error)
            log.warning("%s: %s; every process hashes the tars it reads", path.parent, reason)
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(lock)


def _remember(path: Path) -> None:
    """Write the marker; it replaces the oldest if there are too many."""
    markers = [marker for marker in path.parent.iterdir() if marker.name != LOCK]
    if len(markers) >= MAX_MARKERS:
        min(markers, key=lambda marker: marker.stat().st_mtime_ns).unlink(missing_ok=True)
    path.touch()
