"""Durations as text, and a throttle for what must not be said or looked at too often."""

import time


def duration(seconds: float) -> str:
    """4.23 -> "4.2 s", 72.4 -> "1 min 12 s", 120 -> "2 min", 3725 -> "1 h 2 min"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    units = {"h": hours, "min": minutes, "s": 0 if hours else rest}
    return " ".join(f"{count} {unit}" for unit, count in units.items() if count)


class Throttle:
    """Says whether it is time again; the pause begins when `restart` is called.

    Args:
        pause_s: seconds.
        at_once: whether it is time from the beginning, or only after the first pause.
    """

    def __init__(self, pause_s: float, *, at_once: bool = False) -> None:
        self.pause_s = pause_s
        self._since = float("-inf") if at_once else time.monotonic()

    def is_due(self, pause_s: float | None = None) -> bool:
        """Whether the pause, or another one, is over."""
        return time.monotonic() - self._since >= (self.pause_s if pause_s is None else pause_s)

    def restart(self) -> None:
        self._since = time.monotonic()
