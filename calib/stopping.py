"""A request to stop: how it comes, and what it ends."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ShouldStop = Callable[[], bool]


class Stopped(Exception):
    """A stage has stopped in the middle of an epoch; its state says where."""


class Interrupted(Exception):
    """Training was asked to stop; a checkpoint of all that is done has been written."""


def never() -> bool:
    """For who is not to be stopped."""
    return False


def watch_for_termination() -> ShouldStop:
    """Take SIGTERM as a request to stop; returns whether it came."""
    received, parent = threading.Event(), os.getppid()
    # torchrun gives each process a session of its own, where signals to its group do not reach.
    launched = "TORCHELASTIC_RUN_ID" in os.environ

    def note(signum: int, frame: FrameType | None) -> None:
        received.set()

    signal.signal(signal.SIGTERM, note)
    return lambda: received.is_set() or (launched and os.getppid() != parent)


@contextmanager
def interrupt_on_sigterm(label: str) -> Iterator[None]:
    """While it lasts, what asks for a stop by SIGTERM gets it here: there is nothing to save.

    Raises:
        Interrupted: SIGTERM came.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before):  # nobody takes it as a request
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(f"{label}: stopped while it was measured")

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
