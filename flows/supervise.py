"""Run a child process to its end: its lines to a callback, a watchdog, nothing left behind."""

import math
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flows import child

POLL_S = 0.2
LAST_LINES = 20


class Stop(Protocol):
    """Says when a child must end early; a `threading.Event` is one. Asked five times a second."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        pid: its process, which is no more unless it is stuck.
        returncode: exit status; -n after signal n, as in `subprocess`.
        hung: the watchdog ended it.
        stuck: it lives in spite of SIGKILL, which its returncode names.
        last_lines: the end of its output, for failure messages.
    """

    pid: int
    returncode: int
    hung: bool
    stuck: bool
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        if self.stuck:
            return f"process {self.pid} is stuck in the kernel; SIGKILL did not end it"
        if self.hung:
            return "no heartbeat; ended by the watchdog"
        if self.returncode >= 0:
            return f"exit status {self.returncode}"
        return f"killed by signal {-self.returncode} ({signal.Signals(-self.returncode).name})"


@dataclass
class Heartbeat:
    """A file the child touches while it makes progress; silent once untouched for too long.

    The file's time is only compared with itself, so a clock that jumps does no harm.
    """

    path: Path
    timeout_s: float

    def __post_init__(self) -> None:
        self._touched, self._since = self._mtime(), time.monotonic()

    def silent(self) -> bool:
        touched = self._mtime()
        if touched != self._touched:
            self._touched, self._since = touched, time.monotonic()
        return time.monotonic() - self._since > self.timeout_s

    def _mtime(self) -> int:
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def supervise(
    command: Sequence[str],
    *,
    on_line: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
    stop: Stop | None = None,
    heartbeat: Heartbeat | None = None,
    grace_s: float = child.GRACE_S,
    limit_s: float = math.inf,
) -> Outcome:
    """Run a command until it ends, `stop` is set, its heartbeat stops, or we are interrupted.

    Except that a silent one is killed at once, its process group then gets SIGTERM and, if that
    does not help within `grace_s` seconds, SIGKILL; also when `on_line` raises. An interrupt
    (KeyboardInterrupt or any other exception raised here by a signal handler) is passed on after
    that. What SIGKILL does not end is left.

    Args:
        on_line: called here with every line the child writes, standard error included.
        environment: changes to our own environment.
        limit_s: after which it counts as silent.
    """
    deadline = time.monotonic() + limit_s
    process = child.start(
        command, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    last: deque[str] = deque(maxlen=LAST_LINES)
    hung = False

    def report(timeout_s: float) -> None:
        for line in _take(lines, timeout_s):
            last.append(line)
            on_line(line)

    try:
        reader.start()
        while process.poll() is None and not hung and not (stop and stop.is_set()):
            report(POLL_S)
            hung = (heartbeat is not None and heartbeat.silent()) or time.monotonic() > deadline
    finally:
        # Asked, a hung one might let go of its work, and nobody would know at what it hung.
        child.end(process, grace_s=0.0 if hung else grace_s)
        reader.join(grace_s)
        report(0)  # its last words, also where we are interrupted
    stuck = process.returncode is None
    status = -signal.SIGKILL if stuck else process.returncode
    return Outcome(process.pid, status, hung and status != 0, stuck, tuple(last))


def _read(process: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str]") -> None:
    with process.stdout as stream:  # type: ignore[union-attr]
        for line in stream:
            lines.put(line.rstrip())


def _take(lines: "queue.SimpleQueue[str]", timeout_s: float) -> list[str]:
    """Lines that are there now, after waiting for the first one."""
    taken = []
    try:
        taken.append(lines.get(timeout=timeout_s) if timeout_s else lines.get_nowait())
        while True:
            taken.append(lines.get_nowait())
    except queue.Empty:
        return taken
