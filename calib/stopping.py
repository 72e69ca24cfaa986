"""Stop a training on SIGTERM: the request, and the exceptions that it leads to."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ShouldStop = Callable[[], bool]


class Stopped(Exception):
    """A stage has stopped in the middle of an epoch; its state says after which step."""


class Interrupted(Exception):
    """Training has stopped on request; if it had made progress, a checkpoint has it."""


def never() -> bool:
    """The `ShouldStop` of a training that nobody stops."""
    return False


def watch_for_termination() -> ShouldStop:
    """Treat SIGTERM as a request to stop; returns a function that says whether there was one."""
    received, parent = threading.Event(), os.getppid()
    # torchrun starts processes in new sessions, which signals to its process group do not reach.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ

    def set_received(signum: int, frame: FrameType | None) -> None:
        received.set()

    signal.signal(signal.SIGTERM, set_received)
    return lambda: received.is_set() or (by_torchrun and os.getppid() != parent)


@contextmanager
def interrupt_on_sigterm(label: str) -> Iterator[None]:
    """Within this context, SIGTERM raises Interrupted at once, as there is nothing to save.

    Raises:
        Interrupted: SIGTERM was received.
    """
    previous_handler = signal.getsignal(signal.SIGTERM)
    if not callable(previous_handler):  # nobody watches for SIGTERM
        yield
        return

    def raise_interrupted(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(f"{label}: stopped while it was measured")

    signal.signal(signal.SIGTERM, raise_interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
