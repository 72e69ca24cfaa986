"""The machine as far as a process number names one process of it."""

import hashlib
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

DIGITS = 12  # of the digest at the end of `machine()`


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
