"""What Prefect is told of a worker's lines: all news, and shards now and then."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NEWS = "semix: "  # begins a line that is for a person, too; `pipeline.worker` writes it
EVERY_S = 10.0  # a line a shard would be a million lines in Prefect's database
SHARD = re.compile(r"shard \d+( failed)?: ")


class SlotLog:
    """Passes a worker's lines on; of lines about shards, made or failed, one each now and then.

    Attributes:
        made: shards that its lines said were made.
    """

    def __init__(self, send: Callable[[str], None], *, every_s: float = EVERY_S) -> None:
        self.made = 0
        self._send = send
        self._every_s = every_s
        self._due = {"made": 0.0, "failed": 0.0}  # monotonic
        self._held = {"made": 0, "failed": 0}
        self._last: dict[str, str] = {}

    def __call__(self, line: str) -> None:
        found = SHARD.match(line)
        if found is None:
            self._send(line)
            return
        kind = "failed" if found[1] else "made"
        self.made += kind == "made"
        self._held[kind] += 1
        self._last[kind] = line
        if time.monotonic() >= self._due[kind]:
            self._tell(kind)

    def flush(self) -> None:
        """Send what is held back."""
        for kind, count in self._held.items():
            if count:
                self._tell(kind)

    def _tell(self, kind: str) -> None:
        more = self._held[kind] - 1
        self._send(self._last[kind] + (f" ({more} more {kind} before it)" if more else ""))
        self._held[kind] = 0
        self._due[kind] = time.monotonic() + self._every_s


@contextmanager
def slot_log(send: Callable[[str], None]) -> Iterator[SlotLog]:
    """A SlotLog that holds nothing back in the end."""
    log = SlotLog(send)
    try:
        yield log
    finally:
        log.flush()
