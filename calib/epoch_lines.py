"""Progress lines of a stage's training: one per epoch, and more within long epochs."""

import time
from collections.abc import Mapping

from semix.data.printable import print_line

QUIET_S = 5.0  # between lines, so that short epochs do not print one each
BRIEF = 64  # characters of figures; with name and times a line fills two rows of a narrow terminal
LONG_S = 20.0  # without a line, until one reports progress within an epoch


class EpochLines:
    """Prints lines with rate and remaining time, at most one per epoch and QUIET_S.

    Args:
        label: begins each line.
        epochs: of the stage; it may stop earlier.
        images: real images per epoch, over all processes.
        steps: per epoch.
        first: epochs that were done before.
        printing: false in all processes but the main one.
    """

    def __init__(
        self, label: str, *, epochs: int, images: int, steps: int, first: int, printing: bool
    ) -> None:
        self.label, self.epochs, self.first = label, epochs, first
        self.images, self.steps, self.printing = images, steps, printing
        self.started = self.shown = time.monotonic()
        self._begun: tuple[int, int, float] | None = None  # an epoch, its first step, when

    def show_features(self, done: int) -> None:
        """Called while a stage computes an epoch's features, with the number of images done."""
        if self._is_due(LONG_S):
            self._print(f"features of {done:,} of {self.images:,} images")

    def show_step(self, epoch: int, done: int) -> None:
        """Called after every step, with the number of steps done in the epoch.

        The first step of an epoch is a warm-up and not measured.
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
        """Called after every epoch; the line of the last one is always printed.

        Args:
            done: epochs of the stage that are done.
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
    """The most important figures, as many as a line has room for; history.jsonl has all."""

    def rank(name: str) -> int:
        first = ("loss", "accuracy")
        return first.index(name) if name in first else 3 - name.startswith("validation_")

    values = {name: value for name, value in figures.items() if value is not None}
    line = ""
    for name in sorted(values, key=rank):
        longer = f"{line}  {name} {values[name]:.4g}".strip()
        if len(longer) > BRIEF:
            break
        line = longer
    return line


def clock(seconds: float) -> str:
    """Format seconds as `0:07`, `12:30` or `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
