"""Requests to stop a training: SIGTERM, and the exceptions that follow."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ShouldStop = Callable[[], bool]


class Stopped(Exception):
    """A stage has stopped in the middle of an epoch; its state has the position."""


class Interrupted(Exception):
    """Training was asked to stop; a checkpoint has been written."""


def never() -> bool:
    """The `ShouldStop` of a training that is not to be stopped."""
    return False


def watch_for_termination() -> ShouldStop:
    """Treat SIGTERM as a request to stop; returns a function that says whether it came."""
    received, parent = threading.Event(), os.getppid()
    # torchrun starts each process in a new session, so signals to its group do not reach them.
    launched = "TORCHELASTIC_RUN_ID" in os.environ

    def note(signum: int, frame: FrameType | None) -> None:
        received.set()

    signal.signal(signal.SIGTERM, note)
    return lambda: received.is_set() or (launched and os.getppid() != parent)


@contextmanager
def interrupt_on_sigterm(label: str) -> Iterator[None]:
    """Within this context, SIGTERM raises at once, as there is nothing to save.

    Raises:
        Interrupted: SIGTERM came.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler):  # SIGTERM is not handled as a request
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(f"{label}: stopped while it was measured")

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
