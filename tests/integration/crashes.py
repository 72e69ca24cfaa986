"""Children that die, or meet a full disk, at a chosen step of publishing."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

# Calls that make bytes durable or give them a name; between two of them the disk does not change.
STEPS = ("fsync", "link", "replace", "rename", "unlink")
Work = Callable[[], object]


def in_child(work: Work) -> int:
    """Run `work` in a fork, which shares the loaded models; its exit code, -n for signal n."""
    return wait(start_child(work))


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start_child(work: Work) -> int:
    """Fork a child that runs `work` and exits with 0, or 1 after an exception; its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@contextmanager
def at_step(number: int, act: Work, *, after: bool) -> Iterator[None]:
    """Call `act` before or after this process's publishing step `number`, counted from 0."""
    steps_taken = 0

    def wrapped(step: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            nonlocal steps_taken
            is_chosen, steps_taken = steps_taken == number, steps_taken + 1
            if is_chosen and not after:
                act()
            result = step(*arguments, **options)
            if is_chosen and after:
                act()
            return result

        return run

    with patch.multiple(os, **{name: wrapped(getattr(os, name)) for name in STEPS}):
        yield


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
