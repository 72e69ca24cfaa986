"""Lines on how far a stage's training is: one per epoch, and within long epochs."""

import time
from collections.abc import Mapping

from semix.data.printable import print_line

QUIET_S = 5.0  # between lines, so that short epochs do not print one each
BRIEF = 64  # letters of figures; with a name and times a line is two rows of a narrow terminal
LONG_S = 20.0  # without a line, until one says how far an epoch is


class EpochLines:
    """Lines with rate and remaining time, one per epoch but not too many.

    Args:
        label: begins each line.
        epochs: of the stage at most; it may stop early.
        images: real images of an epoch, over all processes.
        steps: of an epoch.
        first: epochs that were done before.
        printing: false in processes that keep quiet.
    """

    def __init__(
        self, label: str, *, epochs: int, images: int, steps: int, first: int, printing: bool
    ) -> None:
        self.label, self.epochs, self.first = label, epochs, first
        self.images, self.steps, self.printing = images, steps, printing
        self.started = self.shown = time.monotonic()
        self._begun: tuple[int, int, float] | None = None  # an epoch, its first step, when

    def show_features(self, done: int) -> None:
        """Called while a stage makes an epoch's features, with how many images have theirs."""
        if self._is_due(LONG_S):
            self._print(f"features of {done:,} of {self.images:,} images")

    def show_step(self, epoch: int, done: int) -> None:
        """Called after every step, with the steps of the epoch that are done.

        An epoch's first step warms up, so it is not measured.
        """
        if not self.printing:
            return
        if self._begun is None or self._begun[0] != epoch:
            self._begun = epoch, done, time.monotonic()
        elif self._is_due(LONG_S):
            _, first, begun = self._begun
            step_s = (time.monotonic() - begun) / (done - first)
            left = clock(step_s * (self.steps * (self.epochs - epoch) - done))
            where = f"epoch {epoch + 1}/{self.epochs}  step {done:,} of {self.steps:,}"
            self._print(f"{where}  {step_s * self.steps:.3g} s per epoch  {left} left")

    def show_epoch(self, done: int, figures: Mapping[str, float | None], *, last: bool) -> None:
        """Called after every epoch; the last one's line is always printed.

        Args:
            done: epochs of the stage.
        """
        if not (self._is_due(QUIET_S) or last):
            return
        epoch_s = (time.monotonic() - self.started) / (done - self.first)
        shown = brief(figures)
        rate = f"{self.images / epoch_s:,.0f} images/s  {epoch_s:.3g} s per epoch"
        self._print(f"{done}/{self.epochs}  {shown}  {rate}  {self._left(done, epoch_s, last)}")

    def _left(self, done: int, epoch_s: float, last: bool) -> str:
        if last and done < self.epochs:
            return "stopped early"
        return f"{clock(epoch_s * (self.epochs - done))} left"

    def _is_due(self, quiet_s: float) -> bool:
        return time.monotonic() - self.shown >= quiet_s

    def _print(self, text: str) -> None:
        self.shown = time.monotonic()
        if self.printing:
            print_line(f"{self.label} {text}")


SILENT = EpochLines("", epochs=1, images=1, steps=1, first=0, printing=False)


def brief(figures: Mapping[str, float | None]) -> str:
    """The figures of a line that a terminal shows: HISTORY has all of them."""

    def place(name: str) -> int:
        first = ("loss", "accuracy")
        return first.index(name) if name in first else 3 - name.startswith("validation_")

    known = {name: value for name, value in figures.items() if value is not None}
    line = ""
    for name in sorted(known, key=place):
        longer = f"{line}  {name} {known[name]:.4g}".strip()
        if len(longer) > BRIEF:
            break
        line = longer
    return line


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
