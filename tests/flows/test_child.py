import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from semix.flows import child
from semix.flows.child import LAST_LINES, Heartbeat, python_module, supervise

pytestmark = pytest.mark.process


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_line_arrives_in_order_and_the_last_are_kept():
    code = (
        "import sys\nfor i in range(100): print(i, file=(sys.stdout, sys.stderr)[i % 2])\nexit(3)"
    )
    lines = []
    outcome = supervise(python(code), on_line=lines.append)
    assert lines == [str(i) for i in range(100)]
    assert outcome.last_lines == tuple(lines[-LAST_LINES:])
    assert outcome.returncode == 3
    assert str(outcome) == "exit status 3: 99"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import sys; print('error: disk full at /data'); print('more'); sys.exit(75)",
            "disk full",
        ),
        ("print('begun'); raise ValueError('no such thing')", "ValueError: no such thing"),
        ("import sys; print('only this '); print(); sys.exit(4)", "only this"),
    ],
)
def test_the_status_of_a_child_that_failed_carries_its_last_words(code, said):
    outcome = supervise(python(code), on_line=lambda _: None)
    assert re.fullmatch(rf"exit status (1|4|75): {said}( at /data)?", str(outcome))


def test_a_child_without_a_word_has_its_status_alone():
    assert str(supervise(python("exit(3)"), on_line=print)) == "exit status 3"


def test_death_by_a_signal_is_named():
    outcome = supervise(python("import os; os.kill(os.getpid(), 9)"), on_line=print)
    assert outcome.returncode == -9
    assert str(outcome) == "killed by signal 9 (SIGKILL)"


def test_environment_adds_to_ours(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    lines = []
    code = "import os; print(os.environ['KEPT'] + os.environ['ADDED'])"
    supervise(python(code), on_line=lines.append, environment={"ADDED": "2"})
    assert lines == ["12"]


def test_stop_asks_first_and_insists_when_ignored(alive):
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(600)"
    )
    stop, lines = threading.Event(), []

    def on_line(line: str) -> None:
        lines.append(line)
        stop.set()

    outcome = supervise(python(code), on_line=on_line, stop=stop, grace_s=0.5)
    assert lines[1:] == ["asked"]
    assert outcome.returncode == -signal.SIGKILL
    assert not alive(int(lines[0]))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
def test_an_interrupt_ends_the_child_and_passes_on(alive, sleeper, interrupt):
    pids = []

    def on_line(line: str) -> None:
        pids.append(int(line))
        raise interrupt

    with pytest.raises(interrupt):
        supervise([sys.executable, str(sleeper)], on_line=on_line)
    assert not alive(pids[0])


def test_what_a_finished_child_left_behind_is_ended(alive, until, sleeper):
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, {str(sleeper)!r}])"
    code += "; import time; time.sleep(1)"
    lines = []
    assert supervise(python(code), on_line=lines.append).returncode == 0
    until(lambda: not alive(int(lines[0])), timeout_s=20)


def test_a_silent_child_is_ended(tmp_path):
    heartbeat = Heartbeat(tmp_path / "beat", timeout_s=0.5)
    outcome = supervise(python("import time; time.sleep(600)"), on_line=print, heartbeat=heartbeat)
    assert outcome.hung
    assert str(outcome) == "no heartbeat; ended by the watchdog"


def test_a_silent_child_is_not_asked_first(tmp_path):
    heartbeat = Heartbeat(tmp_path / "beat", timeout_s=3.0)
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(600)"
    )
    outcome = supervise(python(code), on_line=print, heartbeat=heartbeat)
    assert (outcome.hung, outcome.last_lines) == (True, ("ready",))


def test_a_child_that_cannot_be_killed_is_left_and_named(alive, sleeper, monkeypatch, caplog):
    monkeypatch.setattr(child, "_signal_group", lambda group, number: True)  # as if in the kernel
    monkeypatch.setattr(child, "KILL_S", 0.1)
    stop = threading.Event()
    outcome = supervise(
        [sys.executable, str(sleeper)], on_line=lambda _: stop.set(), stop=stop, grace_s=0.1
    )
    try:
        assert alive(outcome.pid)
        assert outcome.last_lines == (str(outcome.pid),)
        message = f"process {outcome.pid} is stuck in the kernel; SIGKILL did not end it"
        assert (outcome.stuck, outcome.hung, str(outcome)) == (True, False, message)
        assert f"process {outcome.pid} survived SIGKILL" in caplog.text
    finally:
        os.kill(outcome.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # subprocess may have seen it end
            os.waitpid(outcome.pid, 0)


def test_a_child_that_beats_is_left_alone(tmp_path):
    beat = tmp_path / "beat"
    code = (
        "import time, pathlib\n"
        f"for _ in range(60): pathlib.Path({str(beat)!r}).touch(); time.sleep(0.1)"
    )
    outcome = supervise(python(code), on_line=print, heartbeat=Heartbeat(beat, timeout_s=4.0))
    assert (outcome.returncode, outcome.hung) == (0, False)


def test_a_child_ends_when_its_parent_is_killed(alive, until, sleeper):
    parent = (
        "import sys\nfrom semix.flows.child import python_module, supervise\n"
        "supervise(python_module('sleeper'), on_line=lambda line: print(line, flush=True))"
    )
    paths = os.pathsep.join([str(sleeper.parent), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        python(parent), stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    child = int(process.stdout.readline())
    assert alive(child)
    process.kill()
    process.communicate()
    until(lambda: not alive(child), timeout_s=20)


def test_a_child_whose_parent_was_killed_may_still_speak(tmp_path, until):
    (tmp_path / "lasting.py").write_text(
        "import pathlib, signal, sys\n"
        "def end(*_):\n"
        "    print('x' * 10**6, file=sys.stderr, flush=True)\n"
        "    print('x' * 10**6, flush=True)\n"
        "    pathlib.Path(sys.argv[1]).touch()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('begun', flush=True)\n"
        "while True: signal.pause()\n"
    )
    parent = (
        "import sys\nfrom semix.flows.child import python_module, supervise\n"
        f"supervise(python_module('lasting', {str(tmp_path / 'saved')!r}),"
        " on_line=lambda line: print(line, flush=True))"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        python(parent), stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert process.stdout.readline() == "begun\n"
    process.kill()
    process.communicate()
    until((tmp_path / "saved").exists, timeout_s=20)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def test_a_child_that_was_started_ahead_goes_on_with_the_command(tmp_path, monkeypatch, alive):
    (tmp_path / "heavy.py").write_text("print('imported', flush=True)")
    (tmp_path / "told.py").write_text(
        "import os, sys; print(os.getpid(), sys.argv[1:], os.environ['SLOT'], 'heavy' in "
        "sys.modules); sys.exit(75)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = []
    with child.start_ahead(["heavy"], [{"SLOT": "0"}, {"SLOT": "1"}], **PIPES):
        ahead = {c.environment["SLOT"]: c.process.pid for c in child._ahead}
        for slot in ("1", "1", "2"):
            command = python_module("told", "--a", slot)
            outcome = supervise(command, on_line=lines.append, environment={"SLOT": slot})
            assert outcome.returncode == 75
        assert alive(ahead["0"])
    assert not alive(ahead["0"])
    first_line, *other_lines = [line.split(" ", 1) for line in lines if line != "imported"]
    assert first_line == [str(ahead["1"]), "['--a', '1'] 1 True"]  # the others began when asked for
    assert [text for _, text in other_lines] == ["['--a', '1'] 1 False", "['--a', '2'] 2 False"]
    assert lines.count("imported") == 1


def test_a_child_that_died_while_it_waited_is_replaced(tmp_path, monkeypatch, until, alive):
    (tmp_path / "told.py").write_text("print('told')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = []
    with child.start_ahead([], [{}], **PIPES):
        (pid,) = [waiting.process.pid for waiting in child._ahead]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid))
        outcome = supervise(python_module("told"), on_line=lines.append, environment={})
    assert (outcome.returncode, lines) == (0, ["told"])


def test_a_child_that_waits_ends_when_its_parent_is_killed(tmp_path, monkeypatch, until, alive):
    (tmp_path / "parent.py").write_text(
        "import sys, time\nfrom semix.flows import child\n"
        "with child.start_ahead([], [{}]):\n"
        "    print(child._ahead[0].process.pid, flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, str(tmp_path / "parent.py")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    until(lambda: not alive(pid))


def test_a_module_runs_as_python_would_run_it(tmp_path, monkeypatch):
    (tmp_path / "told.py").write_text(
        "import sys; print(__name__, sys.argv[1:], 'prefect' in sys.modules); sys.exit(75)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = []
    outcome = supervise(python_module("told", "--a", "b c"), on_line=lines.append)
    assert lines == ["__main__ ['--a', 'b c'] False"]
    assert outcome.returncode == 75
