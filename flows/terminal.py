"""Output for people: log lines and errors on standard error, results on standard output."""

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from semix.data.printable import OncePerRun, printable, printable_line

ONCE_PER_RUN = ("semix.calib", "semix.data")  # their warnings are about settings, not events

console = Console(stderr=True)


class _ConsoleHandler(logging.Handler):
    """Prints whole lines through the console, so that they pass above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        time_of_day = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = record.getMessage().replace("\n", "\n  ")  # no line can pass for another message
        with suppress(OSError):  # a log on a full disk must not end the work
            say(f"{time_of_day} {level}{text}")


def set_up_logging(*, debug: bool = False) -> None:
    """Show log lines of semix, from INFO up or all of them."""
    logger = logging.getLogger("semix")
    handler = _ConsoleHandler()
    handler.addFilter(OncePerRun(ONCE_PER_RUN))
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False


@contextmanager
def details_in(path: Path) -> Iterator[None]:
    """Write log lines and bars to a file during the block, as the screen shows something else."""
    with path.open("a", encoding="utf-8") as file:
        console.file = file
        try:
            yield
        finally:
            console.file = None  # type: ignore[assignment]  # whatever standard error is then


def say(text: str) -> None:
    """Print one line as it is, above a progress bar if there is one."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def print_error(text: str) -> None:
    say(f"error: {text}")


def emit(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")


def emit_json(value: Any) -> None:
    emit(json.dumps(value, indent=2, ensure_ascii=False))


def print_findings(rows: Sequence[tuple[str, str, str, str]], styles: Mapping[str, str]) -> None:
    """Print one line per finding: check, state, result; the remedy is below.

    Lines are never cut or broken, so that paths and commands can be copied.

    Args:
        styles: style of each state.
    """
    output = Console()
    check_width, state_width = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    for name, state, result, remedy in rows:
        label = printable_line(name)
        text = Text.assemble(f"{label:{check_width}}  ", (f"{state:{state_width}}", styles[state]))
        text.append(f"  {printable(result)}" + (f"\n    {printable(remedy)}" if remedy else ""))
        output.print(text, soft_wrap=True, highlight=False)


def emit_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print one fact per line, or JSON."""
    if as_json:
        emit_json(facts)
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        text = f"{value:.7g}" if isinstance(value, float) else str(value)
        emit(f"{key.replace('_', ' '):{width}}  {printable_line(text)}")
