"""Shards that other workers hold: when to ask again for each."""

import time

FIRST_S, LONGEST_S = 0.2, 30.0


class Held:
    """Asks the less often the longer a shard is held: many wait for the last ones at once."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # monotonic
        self._due: dict[int, float] = {}

    def add(self, shard: int) -> None:
        """Someone holds it now."""
        now = time.monotonic()
        waited = now - self._since.setdefault(shard, now)
        self._due[shard] = now + min(max(waited, FIRST_S), LONGEST_S)

    def remove(self, shard: int) -> None:
        self._since.pop(shard, None)
        self._due.pop(shard, None)

    def due(self, shard: int) -> bool:
        """Whether to ask for it: nobody held it, or it is time to look again."""
        return self._due.get(shard, 0.0) <= time.monotonic()
