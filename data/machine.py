"""This machine: what names one process of it, its cores, where it keeps what can be had again."""

import hashlib
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

from data.errors import InputError

DIGITS = 12  # of the digest at the end of `machine()`
COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it when it first compiles


def machine() -> str:
    """`host-0123456789ab`: with a process number it names one process, whatever hosts are called.

    Containers may have their host's name and process numbers of their own, and machines that
    were cloned may all have one name.
    """
    host = socket.gethostname()
    digest = hashlib.sha256("\n".join([host, *_boot_and_numbers()]).encode())
    return f"{host}-{digest.hexdigest()[:DIGITS]}"


@cache  # a fork has both in common with its parent
def _boot_and_numbers() -> tuple[str, str]:
    """Linux's identities of this boot and of our process numbers; empty elsewhere."""
    boot = numbers = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        numbers = str(Path("/proc/self/ns/pid").readlink())
    return boot, numbers


def cores() -> int:
    """Cores that this process may run on; systems other than Linux say how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_folder() -> Path:
    """SEMIX_CACHE, or ~/.cache/semix; it need not be there yet, and may be removed at any time."""
    return Path(os.environ.get("SEMIX_CACHE") or "~/.cache/semix").expanduser()


def compiled_folder() -> Path:
    """Where torch keeps the programs that it compiles: as it is told, else in the cache folder."""
    # By machine: a home may be shared, and what was compiled for one processor crash another.
    own = cache_folder() / f"inductor-{socket.gethostname()}"
    return Path(os.environ.get(COMPILED) or own)


def keep_compiled_to_ourselves() -> None:
    """Before anything is compiled: keep it in a folder of ours, unless torch was told of another.

    Left to itself torch runs what it finds in a folder of /tmp that anyone could have made.

    Raises:
        InputError: that folder cannot be made, or others can write in it.
    """
    if os.environ.get(COMPILED):
        return
    folder, remedy = compiled_folder(), f"set {COMPILED} to a folder of yours"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InputError(COMPILED, folder, f"cannot be made ({error.strerror}); {remedy}") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InputError(COMPILED, folder, f"others of this machine can write there; {remedy}")
    os.environ[COMPILED] = str(folder.absolute())
