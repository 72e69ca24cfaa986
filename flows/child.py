"""Child processes that cannot outlive their parent: started, supervised and ended.

`python -m semix.flows.child --grace=SECONDS MODULE [ARGUMENT...]` is what the child runs: `python
-m MODULE`, plus a thread that ends the whole process group when standard input closes, which the
kernel does even if the parent is killed. `--ahead IMPORT,IMPORT...` imports these modules, then
reads the command to run from standard input; further arguments are only for `ps`.
"""

import importlib
import json
import logging
import math
import os
import queue
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

POLL_S = 0.2  # between two checks of a living child
LAST_LINES = 20
GRACE_S = 10.0  # between SIGTERM, which asks a process group to end, and SIGKILL
KILL_S = 30.0  # after SIGKILL, until a process counts as stuck in the kernel
END_POLL_S = 0.05
# A line of semix that names an error, or the end of a traceback.
ERROR_LINE = re.compile(r"error: |[\w.]*(Error|Exception)\b")

log = logging.getLogger("semix.child")


class StopSignal(Protocol):
    """Whether a child must end early, as in a `threading.Event`; read five times per second."""

    def is_set(self) -> bool: ...


def sleep_until_stopped(seconds: float, stop: StopSignal | None) -> None:
    """Sleep for some seconds, or until `stop` is set."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (stop and stop.is_set()):
        time.sleep(POLL_S)


@dataclass(frozen=True)
class ChildExit:
    """How a child process ended.

    Attributes:
        pid: number of its process, which has ended unless it is stuck.
        returncode: exit status; -n after signal n, as in `subprocess`.
        hung: the watchdog ended it.
        stuck: it survived SIGKILL; its returncode is that of SIGKILL.
        last_lines: the end of its output, for failure messages.
    """

    pid: int
    returncode: int
    hung: bool
    stuck: bool
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.how}: {self.error}" if self.exited and self.error else self.how

    @property
    def exited(self) -> bool:
        """Whether it ended by itself, so that its last lines say why."""
        return self.returncode >= 0 and not (self.stuck or self.hung)

    @property
    def how(self) -> str:
        """How it ended, without its last lines."""
        if self.stuck:
            return f"process {self.pid} is stuck in the kernel; SIGKILL did not end it"
        if self.hung:
            return "no heartbeat; ended by the watchdog"
        if self.returncode >= 0:
            return f"exit status {self.returncode}"
        return f"killed by signal {-self.returncode} ({signal.Signals(-self.returncode).name})"

    @property
    def error(self) -> str:
        """The last line that names an error, else the last line; empty if it wrote nothing."""
        lines = [line.strip() for line in reversed(self.last_lines) if line.strip()]
        error_line = next(filter(ERROR_LINE.match, lines), next(iter(lines), ""))
        return error_line.removeprefix("error: ")


@dataclass
class Heartbeat:
    """A file that the child touches while it makes progress; silent after `timeout_s` seconds.

    The file's time is compared only with its earlier time, so a clock that jumps does no harm.
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
    stop: StopSignal | None = None,
    heartbeat: Heartbeat | None = None,
    grace_s: float = GRACE_S,
    limit_s: float = math.inf,
) -> ChildExit:
    """Run a command until it ends, `stop` is set, its heartbeat stops, or we are interrupted.

    Then its process group gets SIGTERM and, after `grace_s` seconds, SIGKILL; a silent one gets
    SIGKILL at once. The same happens when `on_line` raises. An interrupt (KeyboardInterrupt or any
    other exception raised by a signal handler) is passed on afterwards. A process that survives
    SIGKILL is abandoned.

    Args:
        on_line: called in this thread with every line of the child's output and errors.
        environment: changes to the environment of this process.
        limit_s: seconds after which the child counts as silent.
    """
    deadline = time.monotonic() + limit_s
    process = start(
        command, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    hung = False

    def report(timeout_s: float) -> None:
        for line in _read_lines(lines, timeout_s):
            last_lines.append(line)
            on_line(line)

    try:
        reader.start()
        while process.poll() is None and not hung and not (stop and stop.is_set()):
            report(POLL_S)
            hung = (heartbeat is not None and heartbeat.silent()) or time.monotonic() > deadline
    finally:
        # On SIGTERM a hung child might release its work, and nobody would know where it hung.
        end(process, grace_s=0.0 if hung else grace_s)
        reader.join(grace_s)
        report(0)  # its last lines, also when we are interrupted
    stuck = process.returncode is None
    status = -signal.SIGKILL if stuck else process.returncode
    return ChildExit(process.pid, status, hung and status != 0, stuck, tuple(last_lines))


def _read(process: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str]") -> None:
    with process.stdout as stream:  # type: ignore[union-attr]
        for line in stream:
            lines.put(line.rstrip())


def _read_lines(lines: "queue.SimpleQueue[str]", timeout_s: float) -> list[str]:
    """All lines that have arrived, after waiting for the first one."""
    received = []
    try:
        received.append(lines.get(timeout=timeout_s) if timeout_s else lines.get_nowait())
        while True:
            received.append(lines.get_nowait())
    except queue.Empty:
        return received


def python_module(module: str, *arguments: str, grace_s: float = GRACE_S) -> list[str]:
    """The command that runs `module` as a child; the working folder is not on its import path.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL to its group if this process is killed.
    """
    return [*_child_command(), f"--grace={grace_s}", module, *arguments]


def _child_command() -> list[str]:
    return [sys.executable, "-P", "-m", "semix.flows.child"]


@dataclass(frozen=True, eq=False)
class _WaitingChild:
    """A child that was started ahead, for a command with this environment and these options."""

    process: "subprocess.Popen[str]"
    environment: Mapping[str, str]
    options: Mapping[str, Any]


_ahead: list[_WaitingChild] = []
_claim_lock = threading.Lock()


@contextmanager
def start_ahead(
    imports: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    ps_arguments: Sequence[str] = (),
    **options: Any,
) -> Iterator[None]:
    """Start children that import modules now, for `start` to use; unused ones end with the block.

    Args:
        imports: modules that take seconds to import.
        environments: one child per entry; `start` uses one with equal environment and options.
        ps_arguments: words in their command lines, for people who list processes.
    """
    command = [*_child_command(), "--ahead", ",".join(imports), *ps_arguments]
    children = [_WaitingChild(_spawn(command, e, options), e, options) for e in environments]
    _ahead.extend(children)
    try:
        yield
    finally:
        for child in children:
            if _claim(child):
                end(child.process, grace_s=0)


def start(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    """Start a command as leader of its own process group; it ends when its standard input closes.

    A child that `start_ahead` began with this environment and these options runs the command.

    Args:
        environment: changes to the environment of this process.
        options: further arguments of `subprocess.Popen`.
    """
    prefix = _child_command()
    if list(command[: len(prefix)]) == prefix:
        matching = (c for c in list(_ahead) if (c.environment, c.options) == (environment, options))
        for child in matching:
            if _claim(child) and _send_command(child.process, command[len(prefix) :]):
                return child.process
    return _spawn(command, environment, options)


def _claim(child: _WaitingChild) -> bool:
    """Take a waiting child off the list; False if another thread did."""
    with _claim_lock:
        unclaimed = child in _ahead
        if unclaimed:
            _ahead.remove(child)
        return unclaimed


def _send_command(process: "subprocess.Popen[str]", arguments: Sequence[str]) -> bool:
    """Send a waiting child its command; False if it has ended."""
    assert process.stdin is not None
    try:  # not through its buffer, which would be written a second time at close
        os.write(process.stdin.fileno(), json.dumps(list(arguments)).encode() + b"\n")
    except BrokenPipeError:
        end(process, grace_s=0)
        return False
    return True


def _spawn(
    command: Sequence[str], environment: Mapping[str, str] | None, options: Mapping[str, Any]
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        env={**_environment(), **(environment or {})},
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C at the terminal reaches only us; we pass it on
        text=True,
        errors="replace",
        **options,
    )


def end(child: "subprocess.Popen[str]", *, grace_s: float = GRACE_S) -> None:
    """End a child and every process of its group; return when none is left.

    They get SIGTERM, and SIGKILL after `grace_s` seconds, or at once if that is 0. Processes that
    an ended child left behind get SIGKILL at once. A child that survives SIGKILL is left after
    KILL_S seconds, with `returncode` None.
    """
    if grace_s and child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        # A launcher may end at once while the processes it launched still write a checkpoint.
        while _group_lives(child) and time.monotonic() < deadline:
            time.sleep(END_POLL_S)
    _signal_group(child.pid, signal.SIGKILL)
    try:
        child.wait(KILL_S)
    except subprocess.TimeoutExpired:
        log.error(
            "process %d survived SIGKILL: it is stuck in the kernel, as with a lost GPU or a dead "
            "file server; if it stays, restart this machine",
            child.pid,
        )
    if child.stdin is not None:
        child.stdin.close()


def _group_lives(child: "subprocess.Popen[str]") -> bool:
    if child.poll() is None:
        return True
    with suppress(ChildProcessError):  # as process 1 of a container we inherit orphans
        os.waitpid(-child.pid, os.WNOHANG)
    return _signal_group(child.pid, 0)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group; False if it has no process."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS refuses if all of the group have ended
        return False
    return True


def _end_with_parent(grace_s: str) -> None:
    while os.read(0, 4096):
        pass
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # nobody reads them any more, and writing a last line must not fail
        os.dup2(null_device, stream)
    # The killer is in another group: SIGTERM may end this process before those that it launched.
    subprocess.Popen(
        [*_child_command(), f"--insist={grace_s}", str(os.getpgrp())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.killpg(0, signal.SIGTERM)


def _kill_group_after_grace(group: int, grace_s: float) -> None:
    """Kill the remaining processes of a group after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        time.sleep(END_POLL_S)
        if not _signal_group(group, 0):
            return  # another group may get its number
    _signal_group(group, signal.SIGKILL)


def main() -> None:
    option, *arguments = sys.argv[1:]
    if option == "--ahead":
        for module in filter(None, arguments[0].split(",")):
            importlib.import_module(module)
        option, *arguments = json.loads(sys.stdin.readline() or sys.exit(0))
    name, _, grace_s = option.partition("=")
    if name == "--insist":
        _kill_group_after_grace(int(arguments[0]), float(grace_s))
        return
    lifeline = threading.Thread(target=_end_with_parent, args=(grace_s,), daemon=True)
    lifeline.start()
    sys.argv = arguments
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
