"""Process 1 of a container: passes signals to a command, then waits for all that it left.

`python -m flows.container COMMAND [ARGUMENT...]`. When process 1 ends, the kernel kills every
other process at once. A Prefect worker ends before the trainer of its flow, which is still
writing a checkpoint.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

LEFT_S = 150.0  # for what outlives the command: a trainer's grace and some more
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def run(command: Sequence[str]) -> int:
    """Run a command, wait for all that it leaves; its exit status, 128 + n after signal n.

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
        setsigdef=(*PASSED_ON, *IGNORED_BY_PYTHON),
    )
    status, told = _wait_for(process)
    if not told and os.getpid() == 1:
        # Nobody else would end a stray daemon. Those of a command that was told to end are
        # being ended, and a second signal would cut that short.
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGTERM)
    _wait_for_rest(LEFT_S)
    return status if status >= 0 else 128 - status


def _wait_for(process: int) -> tuple[int, bool]:
    """Exit status of a child, -n after signal n, and whether we passed a signal to it."""
    # A terminal sends its Ctrl-C to the command as well.
    ours = (signal.SIGINT,) if sys.stdin is not None and sys.stdin.isatty() else ()
    told = False
    while True:
        number = signal.sigwait({*PASSED_ON, signal.SIGCHLD})
        if number in PASSED_ON and number not in ours:
            os.kill(process, number)
            told = True
        ended, status = os.waitpid(-1, os.WNOHANG)
        while ended:
            if ended == process:
                return os.waitstatus_to_exitcode(status), told
            ended, status = os.waitpid(-1, os.WNOHANG)


def _wait_for_rest(timeout_s: float) -> None:
    """Until no child is left; who loses its parent becomes ours."""
    deadline = time.monotonic() + timeout_s
    with suppress(ChildProcessError):
        while (left := deadline - time.monotonic()) > 0:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            signal.sigtimedwait({signal.SIGCHLD}, left)


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
