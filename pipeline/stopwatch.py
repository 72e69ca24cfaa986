"""Seconds by stage, also of stages that overlap on several threads."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Stopwatch:
    """Adds up the seconds of named stages; `wall` is the time since it was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()
        self._lock = Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        with self._lock:
            self.seconds[name] += time.perf_counter() - start

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._start
