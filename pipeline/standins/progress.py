"""Progress of the trainings: bars on a terminal, an occasional line elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Report = Callable[[str, int, int], None]  # stage, steps done (0 when it starts), steps in all

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown_progress() -> Iterator[Report]:
    """A `Report` that shows each stage's rate and remaining time on stderr."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    with Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    ) as progress:
        yield _Bars(progress)


class Lines:
    """One line every ten seconds, and one at the end of each stage."""

    def __init__(self) -> None:
        self.stage = ""
        self.started = self.shown = 0.0  # seconds of the monotonic clock

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.started, self.shown = stage, now, now
        if done < total and now - self.shown < SECONDS_BETWEEN_LINES:
            return
        self.shown = now
        seconds = max(now - self.started, 1e-6)
        rate = done / seconds
        rest = f"{(total - done) / rate:.0f} s left" if done < total else f"took {seconds:.0f} s"
        print(f"{stage}: {done}/{total}, {rate:.1f} steps/s, {rest}", file=sys.stderr, flush=True)


class _Bars:
    """One bar a stage."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.rows: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self.rows:
            self.rows[stage] = self.progress.add_task(stage, total=total)
        self.progress.update(self.rows[stage], completed=done)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} steps/s" if speed else "")
