"""A counter that several threads may raise at once."""

import threading
from collections import Counter


class Tally(Counter[str]):
    """Counts by name; `tally[name] += 1` could lose what another thread adds meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self[name] += number
