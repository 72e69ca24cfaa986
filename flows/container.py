"""Process 1 of a container: runs a command, then ends what it left in that one's own time.

`python -m flows.container COMMAND [ARGUMENT...]`. When process 1 ends, the kernel kills every
other process at once. Prefect's commands end before their flows, and those before their trainers,
which are still writing a checkpoint.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

LEFT_S = 150.0  # for what outlives the command: a trainer's grace and some more
LOOK_S = 1.0  # between two looks for processes that have become ours
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run(command: list[str]) -> int:
    """Run a command and end all that it leaves; its exit status, 128 + n after signal n.

    Raises:
        OSError: the command cannot be started.
    """
    if os.getpid() != 1:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come to us as well
    # Kept until they are asked for: none is lost, however early it comes.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    process = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        setsigmask=(),
        # Python ignores some, and who started us may ignore others.
        setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
    )
    status = _wait_for(process)
    _end_rest(LEFT_S)
    return status if status >= 0 else 128 - status


def _wait_for(process: int) -> int:
    """Exit status of a child, -n after signal n; signals are passed to it."""
    # A terminal sends its Ctrl-C to the command as well.
    ours = (signal.SIGINT,) if sys.stdin is not None and sys.stdin.isatty() else ()
    while True:
        number = signal.sigwait({*PASSED_ON, signal.SIGCHLD})
        if number in PASSED_ON and number not in ours:
            os.kill(process, number)
        ended, status = os.waitpid(-1, os.WNOHANG)
        while ended:
            if ended == process:
                return os.waitstatus_to_exitcode(status)
            ended, status = os.waitpid(-1, os.WNOHANG)


def _end_rest(timeout_s: float) -> None:
    """Until no child is left. Who loses its parent becomes ours, and is told to end, once."""
    told: set[int] = set()
    deadline = time.monotonic() + timeout_s
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for process in _children() - told:
                told.add(process)
                # What flows.child runs is told by it; a second signal would cut its end short.
                if b"flows.child" not in _arguments(process):
                    os.kill(process, signal.SIGTERM)
            signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)


def _children() -> set[int]:
    """Also those that have ended: none of these numbers can be another's yet."""
    ours = os.getpid()
    there = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return {process for process in there if _parent(process) == ours}


def _parent(process: int) -> int:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # the name before it may hold anything


def _arguments(process: int) -> list[bytes]:
    return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")


def main() -> int:
    command = sys.argv[1:]
    if not command:
        print("usage: python -m flows.container COMMAND [ARGUMENT...]", file=sys.stderr)
        return 2
    try:
        return run(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126  # as shells do


if __name__ == "__main__":
    sys.exit(main())
