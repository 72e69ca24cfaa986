"""Says now and then how far a pass over the real images is."""

import logging
import time
from collections.abc import Callable

SAY_EVERY_S = 30.0

log = logging.getLogger("semix.build")


class Progress:
    """Called with the position in the split that was reached; `beat` hears of each."""

    def __init__(self, total: int, beat: Callable[[], None]) -> None:
        self.total = total
        self.beat = beat
        self.started = self.said = time.monotonic()
        self.first: int | None = None

    def __call__(self, position: int) -> None:
        self.beat()
        now = time.monotonic()
        if self.first is None:  # a pass that goes on after a kill starts in the middle
            self.first, self.started = position, now
        if now - self.said < SAY_EVERY_S:
            return
        self.said = now
        rate = (position - self.first) / max(now - self.started, 1e-9)
        log.info("prototypes: %d of %d images, %.0f a second", position, self.total, rate)
