"""A request to stop, on which all processes agree between two steps."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate import Accelerator

LOOK_S = 1.0  # a request waits so long at most, and a step more; a look costs far less

Stop = Callable[[], bool]


class Stopped(Exception):
    """A stage has stopped in the middle of an epoch; its state says where."""


class Interrupted(Exception):
    """Training was asked to stop; a checkpoint of all that is done has been written."""


def never() -> bool:
    """For who is not to be stopped."""
    return False


def watch_for_termination() -> Stop:
    """Take SIGTERM as a request to stop; returns whether it came."""
    received, parent = threading.Event(), os.getppid()
    # torchrun gives each process a session of its own, where signals to its group do not reach.
    launched = "TORCHELASTIC_RUN_ID" in os.environ

    def note(signum: int, frame: FrameType | None) -> None:
        received.set()

    signal.signal(signal.SIGTERM, note)
    return lambda: received.is_set() or (launched and os.getppid() != parent)


@contextmanager
def ends_at_once(label: str) -> Iterator[None]:
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


class Vote:
    """Whether any process was asked to stop: called after every step, answered alike in all.

    A process alone just asks. Several look together, which waits for the slowest and for the
    device; so they do it once in as many steps as took LOOK_S, found anew at every look.

    Args:
        asked: whether this process was asked.
    """

    def __init__(self, asked: Stop, accelerator: Accelerator) -> None:
        self.asked, self.accelerator = asked, accelerator
        self.every = 1  # steps between two looks
        self._steps, self._since = 0, time.monotonic()

    def __call__(self) -> bool:
        if self.accelerator.num_processes == 1:
            return self.asked()
        self._steps += 1
        return self._steps >= self.every and self.look()

    def look(self) -> bool:
        """Ask now; in every process at the same place."""
        if self.accelerator.num_processes == 1:
            return self.asked()
        seconds = time.monotonic() - self._since
        own = torch.tensor([[float(self.asked()), seconds]], device=self.accelerator.device)
        # The same two numbers in every process, so that all look again after the same step.
        asked, slowest = self.accelerator.gather(own).amax(0).tolist()
        if self._steps:
            steps = int(LOOK_S * self._steps / max(slowest, 1e-6))
            self.every = min(max(1, steps), 2 * self.every)  # one quick step proves little
        self._steps, self._since = 0, time.monotonic()
        return bool(asked)
