"""A child process that cannot outlive us: how it is started, ended, and what it runs first.

`python -m flows.child MODULE [ARGUMENT...]` is the child's end: `python -m MODULE`, plus a thread
that ends the whole process group when standard input closes, which the kernel does for us even
if we are killed.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_S = 10.0  # between asking a process group to end (SIGTERM) and ending it (SIGKILL)
POLL_S = 0.05
CHECKOUT = Path(__file__).resolve().parents[1]


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` as a child; the working folder stays off its path."""
    return [sys.executable, "-P", "-m", "flows.child", module, *arguments]


def start(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    """Start a command as leader of its own process group, with the lifeline as standard input.

    Args:
        environment: changes to our own environment.
        options: further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(
        command,
        env={**_environment(), **(environment or {})},
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C at the terminal reaches us alone; we pass it on
        text=True,
        errors="replace",
        **options,
    )


def end(child: "subprocess.Popen[str]", *, grace_s: float = GRACE_S) -> None:
    """End a child and every process of its group; returns when none is left.

    They are asked with SIGTERM, and ended with SIGKILL after `grace_s` seconds. What a child
    that ended by itself left behind is ended at once.
    """
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        # A launcher may go at once while what it launched still writes a checkpoint.
        while _group_lives(child) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


def _group_lives(child: "subprocess.Popen[str]") -> bool:
    if child.poll() is None:
        return True
    with suppress(ChildProcessError):  # as process 1 of a container we inherit orphans
        os.waitpid(-child.pid, os.WNOHANG)
    return _signal_group(child.pid, 0)


def _environment() -> dict[str, str]:
    ours = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if (CHECKOUT / "pyproject.toml").is_file():  # not installed: children import what we import
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CHECKOUT), ours.get("PYTHONPATH"))))
    return ours


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anyone to signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS refuses for a group of the dead
        return False
    return True


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
