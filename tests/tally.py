"""A counter that several threads raise at once without losing any of it."""

import threading
from collections import Counter


class Tally(Counter[str]):
    """By name; `tally[name] += 1` alone would lose what another thread adds meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self[name] += number
