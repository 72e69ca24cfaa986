"""This machine: its identity, the cores and memory that a process may use, its caches."""

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from semix.data.errors import InputError
from semix.data.files import write_atomically
from semix.data.fingerprint import file_digest, fingerprint

DIGITS = 12  # of the digest at the end of `machine()`
COMPILE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it when it first compiles
DIGEST = re.compile("[0-9a-f]{64}")
# A file that was written more recently could change again and keep its time, as the clock of a
# file system is coarse: its digest is not cached.
SETTLED_NS = 2_000_000_000
CGROUPS = Path("/sys/fs/cgroup")
# A line per hierarchy: its number, its controllers, and the group of this process.
OWN_CGROUPS = Path("/proc/self/cgroup")


def machine() -> str:
    """`host-0123456789ab`: with a process number it identifies one process uniquely.

    Host names do not: containers may share the name of their host, cloned machines may have one.
    """
    host = socket.gethostname()
    digest = hashlib.sha256("\n".join([host, *_boot_and_pid_namespace()]).encode())
    return f"{host}-{digest.hexdigest()[:DIGITS]}"


@cache  # a fork shares both with its parent
def _boot_and_pid_namespace() -> tuple[str, str]:
    """Linux's ids of this boot and of the PID namespace of this process; else empty."""
    boot = pid_namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        pid_namespace = str(Path("/proc/self/ns/pid").readlink())
    return boot, pid_namespace


def cores() -> int:
    """Cores that this process may run on; all cores on systems other than Linux."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores(root: Path = CGROUPS, own_groups: Path = OWN_CGROUPS) -> int:
    """Cores that this process may run on, at most the CPU quota of its control groups."""
    groups = _cgroups(root, own_groups, "cpu")
    quotas = [quota for folder in groups if (quota := _cpu_quota(folder))]
    return max(1, int(min([cores(), *quotas])))


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest memory limit of the control groups of this process, as of a container.

    Attributes:
        remaining: bytes until it is reached; the file cache counts as free.
    """

    limit: int
    remaining: int


def memory_limit(root: Path = CGROUPS, own_groups: Path = OWN_CGROUPS) -> MemoryLimit | None:
    """The limit with the fewest remaining bytes among the control groups; None without one."""
    limits = []
    for folder in _cgroups(root, own_groups, "memory"):
        if (limit := _number(folder, "memory.max", "memory.limit_in_bytes")) is None:
            continue
        used = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        cached = _statistics(folder, "inactive_file", "total_inactive_file")
        limits.append(MemoryLimit(limit, max(0, limit - max(0, used - cached))))
    return min(limits, key=lambda limit: limit.remaining, default=None)


def _cgroups(root: Path, own_groups: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups of this process, innermost first; some may not be visible."""
    if not own_groups.is_file():  # macOS
        return
    for line in own_groups.read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / controller if names else root  # version 1 has one tree per controller
        for depth in range(len(Path(path).parts), 0, -1):
            yield base.joinpath(*Path(path).parts[1:depth])


def _cpu_quota(folder: Path) -> float | None:
    """CPU quota of a group, in cores; None without a limit."""
    if (folder / "cpu.max").is_file():
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us = _number(folder, "cpu.cfs_quota_us")
    period_us = _number(folder, "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _number(folder: Path, *names: str) -> int | None:
    """The number in the first file that exists; None without a file or a limit."""
    for name in names:
        if (folder / name).is_file():
            text = (folder / name).read_text().strip()
            return None if text == "max" else int(text)
    return None


def _statistics(folder: Path, *names: str) -> int:
    """The value of the last of these entries in memory.stat; 0 without any."""
    path, count = folder / "memory.stat", 0
    for line in path.read_text().splitlines() if path.is_file() else ():
        name, _, value = line.partition(" ")
        count = int(value) if name in names else count
    return count


def cache_folder() -> Path:
    """SEMIX_CACHE, or ~/.cache/semix; it need not exist yet, and may be removed at any time."""
    return Path(os.environ.get("SEMIX_CACHE") or "~/.cache/semix").expanduser()


def remembered_digest(path: Path) -> str:
    """SHA-256 of a file, from the cache folder if the file was not written since it was hashed.

    Models have gigabytes. The key of the cache is the path, inode, size and time of
    writing.
    """
    state = path.stat()
    return _cached_digest(path.resolve(), state.st_ino, state.st_size, state.st_mtime_ns)


@cache
def _cached_digest(path: Path, *state: int) -> str:
    cached = cache_folder() / f"digest-{fingerprint([str(path), *state])}"
    with suppress(OSError, ValueError):
        if DIGEST.fullmatch(digest := cached.read_text()):
            return digest
    digest = file_digest(path)
    *_, written_ns = state
    if time.time_ns() - written_ns > SETTLED_NS:
        with suppress(OSError):  # a cache that cannot be written only costs time
            write_atomically(cached, digest.encode())
    return digest


def compiled_folder() -> Path:
    """Folder of the programs that torch compiles: that of its variable, else one in the cache."""
    # One per machine: machines may share a home, and code for one processor may crash another.
    default = cache_folder() / f"inductor-{socket.gethostname()}"
    return Path(os.environ.get(COMPILE_VARIABLE) or default)


def keep_compiled_to_ourselves() -> None:
    """Let torch compile into a folder of this user, unless its variable names a folder.

    By default torch runs programs from a folder in /tmp that any user could have created.

    Raises:
        InputError: that folder cannot be made, or other users can write in it.
    """
    if os.environ.get(COMPILE_VARIABLE):
        return
    folder, remedy = compiled_folder(), f"set {COMPILE_VARIABLE} to a folder of yours"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        remedy = f"cannot be made ({error.strerror}); {remedy}"
        raise InputError(COMPILE_VARIABLE, folder, remedy) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise InputError(COMPILE_VARIABLE, folder, f"other users can write there; {remedy}")
    os.environ[COMPILE_VARIABLE] = str(folder.absolute())
