"""Print the progress of a training stage: a line per epoch, and more lines in long epochs."""

import time
from collections.abc import Mapping

from semix.data.pace import Throttle, duration
from semix.data.printable import print_line

MIN_PAUSE_S = 5.0  # least time between two lines, so that not every short epoch prints one
MAX_WIDTH = 64  # characters of metrics; with name and times a line has two rows of 80 at most
MAX_PAUSE_S = 20.0  # longest time without a line, in an epoch that lasts longer


class EpochLines:
    """Prints metrics, rate and remaining time: at most a line per epoch, and per MIN_PAUSE_S.

    Args:
        label: the beginning of each line.
        epochs: number of epochs of the stage, which may stop earlier.
        images: real images per epoch, over all processes.
        steps: steps per epoch.
        first: number of epochs that were done before.
        printing: whether to print; true in the main process only.
    """

    def __init__(
        self, label: str, *, epochs: int, images: int, steps: int, first: int, printing: bool
    ) -> None:
        self.label, self.epochs, self.first = label, epochs, first
        self.images, self.steps, self.printing = images, steps, printing
        self.started, self._throttle = time.monotonic(), Throttle(MIN_PAUSE_S)
        # Where timing of an epoch starts: the epoch, the number of steps done, the time.
        self._epoch_start: tuple[int, int, float] | None = None

    def show_features(self, images_done: int) -> None:
        """Called while a stage computes the features for an epoch; counts the images done."""
        if self._throttle.is_due(MAX_PAUSE_S):
            self._print(f"features of {images_done:,} of {self.images:,} images")

    def show_step(self, epoch: int, steps_done: int) -> None:
        """Called after every step, with the number of steps done in the epoch.

        The first step of an epoch is a warm-up and is not timed.
        """
        if not self.printing:
            return
        if self._epoch_start is None or self._epoch_start[0] != epoch:
            self._epoch_start = epoch, steps_done, time.monotonic()
        elif self._throttle.is_due(MAX_PAUSE_S):
            _, first, started = self._epoch_start
            step_s = (time.monotonic() - started) / (steps_done - first)
            remaining = duration(step_s * (self.steps * (self.epochs - epoch) - steps_done))
            position = f"epoch {epoch + 1}/{self.epochs}  step {steps_done:,} of {self.steps:,}"
            self._print(f"{position}  {step_s * self.steps:.3g} s per epoch  {remaining} left")

    def show_epoch(
        self, epochs_done: int, metrics: Mapping[str, float | None], *, last: bool
    ) -> None:
        """Called after every epoch; the line of the last epoch is always printed.

        Args:
            epochs_done: number of epochs done in this stage.
        """
        if not (self._throttle.is_due() or last):
            return
        epoch_s = (time.monotonic() - self.started) / (epochs_done - self.first)
        values = format_metrics(metrics)
        rate = f"{self.images / epoch_s:,.0f} images/s  {epoch_s:.3g} s per epoch"
        remaining = self._remaining(epochs_done, epoch_s, last)
        self._print(f"{epochs_done}/{self.epochs}  {values}  {rate}  {remaining}")

    def _remaining(self, epochs_done: int, epoch_s: float, last: bool) -> str:
        if last and epochs_done < self.epochs:
            return "stopped early"
        return f"{duration(epoch_s * (self.epochs - epochs_done))} left"

    def _print(self, text: str) -> None:
        self._throttle.restart()
        if self.printing:
            print_line(f"{self.label} {text}")


SILENT = EpochLines("", epochs=1, images=1, steps=1, first=0, printing=False)


def format_metrics(metrics: Mapping[str, float | None]) -> str:
    """The most important metrics, up to MAX_WIDTH characters; history.jsonl has all metrics."""

    def rank(name: str) -> int:
        leading = ("loss", "accuracy")
        return leading.index(name) if name in leading else 3 - name.startswith("validation_")

    values = {name: value for name, value in metrics.items() if value is not None}
    line = ""
    for name in sorted(values, key=rank):
        extended = f"{line}  {name} {values[name]:.4g}".strip()
        if len(extended) > MAX_WIDTH:
            break
        line = extended
    return line
