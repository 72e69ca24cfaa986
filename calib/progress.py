"""Lines of progress: what an epoch gave, how fast it goes, how long it will take."""

import time
from collections.abc import Mapping

QUIET_S = 5.0  # between lines, so that short epochs do not print one each


class Progress:
    """Lines with rate and remaining time, one an epoch but not too many.

    Args:
        label: begins each line.
        epochs: of the stage at most; it may stop early.
        images: real images an epoch, over all processes.
        first: epochs that were done before.
    """

    def __init__(self, label: str, *, epochs: int, images: int, first: int) -> None:
        self.label, self.epochs, self.images, self.first = label, epochs, images, first
        self.started = self.shown = time.monotonic()

    def show(self, done: int, figures: Mapping[str, float | None], *, last: bool) -> None:
        """Print the line of an epoch; that of the last one always."""
        now = time.monotonic()
        if now - self.shown < QUIET_S and not last:
            return
        self.shown = now
        epoch_s = (now - self.started) / (done - self.first)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in figures.items() if v is not None)
        rate = f"{self.images / epoch_s:,.0f} images/s"
        times = f"{rate}  {self._left(done, epoch_s, last)}"
        print(f"{self.label} {done}/{self.epochs}  {shown}  {times}", flush=True)

    def _left(self, done: int, epoch_s: float, last: bool) -> str:
        if last and done < self.epochs:
            return "stopped early"
        left = round(epoch_s * (self.epochs - done))
        return f"{left // 60}:{left % 60:02d} left"
