import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's"),
]

CHECKOUT = Path(__file__).parents[2]
INIT = [sys.executable, "-P", "-m", "flows.container"]
NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"])]
NAMESPACE += ["--pid", "--fork", "--mount-proc", "--kill-child"]
PATIENCE_S = 100

# Ends at once, as a Prefect worker does; what it launched is told by its lifeline.
WORKER = """
import time
from flows import child
child.start(child.python_module("slow_to_end", grace_s=120.0))
time.sleep(300)
"""
# As `prefect flow-run execute` does: it tells its flow nothing, and that ends what it launched.
CARELESS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", '''
import signal, sys
from flows.supervise import supervise
from flows.child import python_module
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
supervise(python_module("slow_to_end", grace_s=120.0), on_line=print, grace_s=120.0)
'''])
time.sleep(300)
"""
TRAINER = """
import pathlib, signal, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path("started").touch()
while not told:
    time.sleep(0.02)
time.sleep(2)
pathlib.Path("checkpoint").write_text(str(len(told)))
"""
# Its parent ends at once, and it has a session of its own.
DAEMON = """
import os, pathlib, sys
if os.fork() == 0:
    os.setsid()
    os.execvp("sleep", ["sleep", "300"])
sys.exit(5)
"""


@pytest.fixture(params=["subreaper", "namespace"])
def init(request):
    """The command that runs another: as any process, and as process 1."""
    if request.param == "subreaper":
        return INIT
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespace of processes here: {tried.stderr.strip()}")
    return [*NAMESPACE, *INIT]


def started(command, folder, **options):
    path = os.pathsep.join((str(CHECKOUT), str(folder)))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **options)


def process_of_init(process):
    """It is unshare's child, where that is used."""
    found = psutil.Process(process.pid)
    return found.children()[0] if "unshare" in process.args else found


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("command", [WORKER, CARELESS], ids=["worker", "careless"])
def test_what_outlives_the_command_ends_in_its_own_time(init, command, tmp_path):
    (tmp_path / "slow_to_end.py").write_text(TRAINER)
    process = started([*init, sys.executable, "-c", command], tmp_path)
    until((tmp_path / "started").exists)
    process_of_init(process).terminate()
    assert process.wait(PATIENCE_S) == 128 + 15
    assert (tmp_path / "checkpoint").read_text() == "1"  # and it was told once


def test_a_daemon_that_was_left_is_ended(init, tmp_path):
    process = started([*init, sys.executable, "-c", DAEMON], tmp_path)
    assert process.wait(PATIENCE_S) == 5


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -KILL $$"], 128 + 9),
        (["no-such-command"], 127),
        (["/etc/passwd"], 126),
        ([], 2),
    ],
)
def test_the_exit_status_is_that_of_the_command(init, command, status, tmp_path):
    assert started([*init, *command], tmp_path).wait(PATIENCE_S) == status


def test_orphans_are_reaped_while_the_command_runs(init, tmp_path):
    code = "import subprocess, time; subprocess.run(['sh', '-c', 'true & true & true']);"
    code += "open('left', 'w').close(); time.sleep(300)"
    process = started([*init, sys.executable, "-c", code], tmp_path)
    until((tmp_path / "left").exists)
    ours = process_of_init(process)
    until(lambda: len(ours.children()) == 1)
    ours.terminate()
    assert process.wait(PATIENCE_S) == 128 + 15


def test_the_command_has_every_signal_at_its_default(init, tmp_path):
    shown = started([*init, "cat", "/proc/self/status"], tmp_path, stdout=subprocess.PIPE)
    told = dict(line.split(":\t", 1) for line in shown.communicate()[0].splitlines())
    standard = (1 << 31) - 1  # the C library keeps two beyond to itself
    for name in ("SigBlk", "SigIgn", "SigCgt"):
        assert int(told[name], 16) & standard == 0, name
