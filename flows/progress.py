"""Progress of a build from its commit records: a bar on a terminal, elsewhere log lines."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from semix.data.errors import InputError
from semix.data.flags import DamagedFlags, read_excluded
from semix.data.label_sets import LabelSet, label_sets
from semix.data.lineage import describe_source, source
from semix.data.pace import Throttle, duration
from semix.data.printable import printable_line
from semix.data.root import RecordTotals, Root, RootProgress, Round
from semix.flows.prices import Price, describe_root_cost, root_cost
from semix.flows.terminal import console, emit_facts
from semix.pipeline.relabel import command_of

LINE_EVERY_S = 15.0
LOOK_EVERY_S = 1.0

log = logging.getLogger("semix.build")


@dataclass
class Rate:
    """Images per second since the first shard of this run was committed."""

    value: float | None = None
    _first: tuple[float, int] | None = None
    _last: int | None = None

    def update(self, images_done: int, now: float) -> None:
        # The time to the first commit includes loading models, so it is left out.
        if self._last is not None and images_done > self._last:
            if self._first is None:
                self._first = (now, images_done)
            else:
                self.value = (images_done - self._first[1]) / (now - self._first[0])
        self._last = images_done


def image_count(progress: RootProgress) -> str:
    return f"{progress.images_done:,} of {progress.images:,} images"


def images_left(progress: RootProgress) -> int:
    """Images that are still to be made."""
    return progress.images - progress.images_done


def describe(progress: RootProgress, rate: float | None) -> str:
    """`1 failed shard, 45.1 images/s, about 2 min left`, without what is unknown or zero."""
    texts = []
    if progress.failed:
        texts.append(f"{progress.failed} failed {'shard' if progress.failed == 1 else 'shards'}")
    if rate:
        texts.append(f"{rate:.3g} images/s")
    if rate and (left := images_left(progress)):
        texts.append(f"about {duration(left / rate)} left")
    return ", ".join(texts)


def derived_metrics(progress: RootProgress, totals: RecordTotals) -> dict[str, Any]:
    """Metrics derived from the commit records; rates are of one worker with loaded models."""
    made = progress.images_done - totals.left_out * (progress.images // max(1, progress.groups))
    rate = made / totals.seconds if totals.seconds else None
    left = images_left(progress) / rate if rate else None
    return {
        "images_per_second": rate and round(rate, 3),
        "worker_seconds_left": left and round(left, 1),
    }


def show_root(root: Root, *, as_json: bool, full: bool, price: Price | None = None) -> None:
    """Print the progress of a root, and with `full` or a price the speed from all its records."""
    counts = root.progress()
    facts = {**root.status(), "missing": counts.shards - counts.done}
    if "rounds" in facts and not as_json:
        facts["rounds"] = "; ".join(map(_describe_round, facts["rounds"]))
    if full or price is not None:
        facts |= _record_facts(counts, root.totals(), as_json=as_json, price=price)
    if excluded := _excluded_series(root):
        facts["excluded_series"] = excluded
    facts["lineage"] = source(root.plan) if as_json else describe_source(source(root.plan))
    if digests := label_sets(root):
        facts["label_sets"] = ", ".join(digest[:12] for digest in digests)
        incomplete = incomplete_sets(root)
        facts |= {"incomplete_label_sets": incomplete} if as_json else label_set_lines(incomplete)
    emit_facts(facts, as_json=as_json)


def _excluded_series(root: Root) -> int | str:
    """How many series people excluded, or why that is unknown."""
    try:
        return len(read_excluded(root).groups)
    except DamagedFlags as error:
        return f"unknown: {error}"


def _describe_round(planned: Round) -> str:
    """`45 series in shards 0-7, even`."""
    return f"{planned['series']} series in shards {planned['shards']}, {planned['by']}"


def _record_facts(
    counts: RootProgress, totals: RecordTotals, *, as_json: bool, price: Price | None
) -> dict[str, Any]:
    """What only the commit records say: seconds, speed, series left out, the price."""
    facts = {**asdict(totals), **derived_metrics(counts, totals)}
    if price is not None:
        cost = root_cost(totals, facts["worker_seconds_left"], price)
        facts["price"] = cost if as_json else describe_root_cost(cost, price)
    if not as_json:
        facts["seconds"] = duration(totals.seconds)
        facts["stages"] = by_stage(totals.stages)
        facts["left_out"] = f"{totals.left_out} series"
        if not totals.left_out:
            del facts["left_out"]
    return facts


def incomplete_sets(root: Root) -> list[dict[str, Any]]:
    """Label sets that lack labels of committed shards, and the command that completes each."""
    rows = []
    for digest in label_sets(root):
        try:
            labels = LabelSet(root, digest)
            if missing := labels.missing():
                facts = {"missing": len(missing), "command": command_of(labels)}
                rows.append({"digest": digest, **facts})
        except (InputError, ValueError) as error:  # damaged, or of a newer version
            rows.append({"digest": digest, "problem": str(error)})
    return rows


def label_set_lines(sets: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """One readable line per incomplete label set."""
    lines = {}
    for facts in sets:
        template = "lacks labels of {missing:,} shards; make them: {command}"
        text = facts.get("problem") or template.format(**facts)
        lines[f"label set {facts['digest'][:12]}"] = text
    return lines


def by_stage(stages: Mapping[str, float]) -> str:
    """`generate 4 min, encode 1.2 s`: the longest stage first."""
    ordered = sorted(stages.items(), key=lambda stage: -stage[1])
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in ordered)


class Steps:
    """The steps of a long command: a table with times, or without a terminal one line per step.

    Args:
        expected: seconds per step on two cores; the ratio of actual to expected seconds of ended
            steps scales the time left. A step with 0 runs at the same time as another one.
    """

    def __init__(self, expected: Mapping[str, float]) -> None:
        self.expected = dict(expected)
        self.times: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._live: Live | None = None

    @contextmanager
    def displayed(self) -> Iterator[None]:
        """Show the steps during the block."""
        output = Console(stderr=True)
        if not output.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=output, refresh_per_second=2) as self._live:
            yield

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        log.info("%s", name)
        self._begun[name] = time.monotonic()
        yield
        self.end(name)

    def end(self, name: str) -> None:
        """Mark a step as ended; one that never began was done already."""
        started = self._begun.pop(name, None)
        self.times[name] = 0.0 if started is None else time.monotonic() - started
        if self._live is None:
            remaining = (
                f"; about {duration(self.left())} left"
                if len(self.times) < len(self.expected)
                else ""
            )
            self.say(f"{name}: {self._time(name)}{remaining}")

    def say(self, text: str) -> None:
        """Print a line above the table."""
        output = self._live.console if self._live else Console(stderr=True)
        output.print(printable_line(text), markup=False, highlight=False, soft_wrap=True)

    def left(self) -> float:
        """Seconds until all steps have ended."""
        expected_s = sum(self.expected[name] for name in self.times if self.times[name])
        ratio = sum(self.times[name] for name in self.times if self.expected[name]) / (
            expected_s or 1
        )
        return sum(self._left_of(name, ratio if expected_s else 1.0) for name in self.expected)

    def _left_of(self, name: str, ratio: float) -> float:
        if name in self.times:
            return 0.0
        started = self._begun.get(name)
        elapsed = 0.0 if started is None else time.monotonic() - started
        return max(0.0, ratio * self.expected[name] - elapsed)

    def _time(self, name: str) -> str:
        if name in self.times:
            return duration(self.times[name]) if self.times[name] >= 0.5 else "done before"
        if name in self._begun:
            return f"{duration(time.monotonic() - self._begun[name])} so far"
        return ""

    def _table(self) -> Table:
        left = f"about {duration(self.left())} left"
        table = Table(box=None, show_header=False, caption=left, caption_justify="left")
        for name in self.expected:
            mark = "done" if name in self.times else "now" if name in self._begun else ""
            table.add_row(mark, Text(name), self._time(name))
        return table


@contextmanager
def throttle(
    read: Callable[[], RootProgress], listeners: Sequence[Callable[[RootProgress], None]]
) -> Iterator[Callable[[], None]]:
    """Yields a function that calls the listeners with the progress, at most every LOOK_EVERY_S.

    The listeners also get the progress at the end of the block.
    """
    pause = Throttle(LOOK_EVERY_S, at_once=True)

    def notify() -> None:
        current = read()
        pause.restart()
        for listener in listeners:
            listener(current)

    yield lambda: notify() if pause.is_due() else None
    notify()


@contextmanager
def progress_display(title: str) -> Iterator[Callable[[RootProgress], None]]:
    """Yields a function that shows a RootProgress; it may be called at any rate."""
    rate = Rate()
    if not console.is_terminal:
        yield _line_logger(title, rate)
        return
    columns: tuple[Any, ...] = ("{task.description}", BarColumn(), "{task.fields[count]}")
    columns += (TimeElapsedColumn(), TextColumn("{task.fields[detail]}"))
    with Bar(*columns, console=console, refresh_per_second=2) as bar:
        task = bar.add_task(title, total=None, count="", detail="")

        def show(progress: RootProgress) -> None:
            rate.update(progress.images_done, time.monotonic())
            count, detail = image_count(progress), describe(progress, rate.value)
            done = progress.images_done
            total = done + images_left(progress)
            bar.update(task, total=total, completed=done, count=count, detail=detail)

        yield show


@contextmanager
def count_display(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of `done` and `total` that shows a bar, only on a terminal."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, refresh_per_second=4, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def running_count(title: str) -> Iterator[Callable[[int], None]]:
    """Yields a function of the number that is done, of an unknown total, which shows it."""
    started = time.monotonic()

    def text(done: int) -> str:
        return f"{done:,} ({done / max(time.monotonic() - started, 1e-6):,.0f} per second)"

    if console.is_terminal:
        with Bar("{task.description}", TextColumn("{task.fields[text]}"), console=console) as bar:
            task = bar.add_task(title, total=None, text="")
            yield lambda done: bar.update(task, text=text(done))
        return
    throttle = Throttle(LINE_EVERY_S)

    def show(done: int) -> None:
        if throttle.is_due():
            throttle.restart()
            log.info("%s: %s", title, text(done))

    yield show


def _line_logger(title: str, rate: Rate) -> Callable[[RootProgress], None]:
    throttle = Throttle(LINE_EVERY_S, at_once=True)
    logged_shards = -1

    def show(progress: RootProgress) -> None:
        nonlocal logged_shards
        rate.update(progress.images_done, time.monotonic())
        complete = progress.done == progress.shards
        if progress.done != logged_shards and (throttle.is_due() or complete):
            throttle.restart()
            logged_shards = progress.done
            text = f"{title}: {image_count(progress)}"
            log.info("%s", ", ".join(filter(None, (text, describe(progress, rate.value)))))

    return show
