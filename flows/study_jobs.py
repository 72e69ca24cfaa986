"""Jobs of a study that several slots take; one may come back from a slot that was lost."""

import threading
from collections import deque
from collections.abc import Iterable

from calib.study import Job
from flows.supervise import Stop

LOOK_S = 1.0


class Jobs:
    """A queue that ends when none is left and none is in a slot's hands."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._left = deque(jobs)
        self._in_hand = 0
        self._changed = threading.Condition()

    def take(self, stop: Stop) -> Job | None:
        """The next one, as soon as there is one; None if there will be none, or at a stop."""
        with self._changed:
            while not self._left:
                if not self._in_hand or stop.is_set():
                    return None
                self._changed.wait(LOOK_S)
            self._in_hand += 1
            return self._left.popleft()

    def end(self, rest: Job | None = None) -> None:
        """One that was taken is over, but for what is left of it: that is for other slots."""
        with self._changed:
            self._in_hand -= 1
            if rest is not None:
                self._left.append(rest)
            self._changed.notify_all()
