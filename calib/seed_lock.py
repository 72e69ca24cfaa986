"""One training at a time in a seed's folder, over all machines that share it."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from calib.stopping import Interrupted, Stop, never
from data.errors import InputError

LOCK = ".lock"
# An earlier trainer whose flow was killed is given two minutes for its checkpoint.
PATIENCE_S = 150.0
LOOK_S = 0.2


@contextmanager
def alone_with(folder: Path, *, label: str, stop: Stop = never) -> Iterator[None]:
    """Hold the lock of a seed's folder; the kernel lets it go however this process ends.

    Args:
        label: begins the line that says what is waited for.
    Raises:
        InputError: another training holds it and does not end.
        Interrupted: `stop` said so before we had it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            _acquire(file, folder, label=label, stop=stop)
        except OSError as error:  # not every network's file system has locks
            print(f"{label}: {folder} has no lock ({error.strerror}); train it once at a time")
        yield


def _acquire(file: IO[str], folder: Path, *, label: str, stop: Stop) -> None:
    deadline, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if stop():
            raise Interrupted(f"{label}: stopped before it was begun")
        if time.monotonic() > deadline:
            remedy = f"another training works in {folder.name}; wait for its end, or stop it"
            raise InputError("run", folder.parent, remedy)
        if not told:
            print(f"{label}: waiting for another training in {folder} to end", flush=True)
            told = True
        time.sleep(LOOK_S)
