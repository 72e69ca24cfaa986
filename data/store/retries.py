"""Again, after a growing pause, what may succeed the next time."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger("semix.store")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 16.0
_random = random.Random()  # its own: nobody's seeds are touched


@dataclass(frozen=True)
class Patience:
    """How long one operation goes on.

    Attributes:
        seconds: no new attempt later than this after the first.
        attempts: of each request inside one of ours, by the cloud's own library.
        connect_s, answer_s: how long a connection, and a silent server, is waited for.
    """

    seconds: float
    attempts: int
    connect_s: float
    answer_s: float


PATIENT = Patience(seconds=120.0, attempts=4, connect_s=10.0, answer_s=30.0)
# For the first look at a place, where a wrong address is likelier than an outage.
QUICK = Patience(seconds=4.0, attempts=1, connect_s=3.0, answer_s=6.0)


def retrying(
    operation: Callable[[], T],
    *,
    what: str,
    heals: Callable[[Exception], str | None],
    patience: Patience,
) -> T:
    """The operation's result, at the latest attempt that the patience allows.

    Args:
        what: for the log.
        heals: names the fault if another attempt may succeed; never a secret.
    """
    started, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return operation()
        except Exception as error:
            fault = heals(error)
            # Half of the pause is drawn, so that many workers do not come back as one.
            wait = pause * _random.uniform(0.5, 1.5)
            if fault is None or time.monotonic() + wait > started + patience.seconds:
                raise
        logger.warning("%s: %s; again in %.1f s", what, fault, wait)
        time.sleep(wait)
        pause = min(2 * pause, LONGEST_PAUSE_S)
