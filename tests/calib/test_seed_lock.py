"""Two trainings never work on one seed; what dies lets go."""

import subprocess
import sys

import pytest

from calib import run_folder
from calib.run_folder import alone_with
from calib.stopping import Interrupted
from data.errors import InputError

pytestmark = pytest.mark.process

HOLDER = """
import sys, time
from pathlib import Path
from calib.run_folder import alone_with
with alone_with(Path(sys.argv[1]), label="first"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock of seed-0."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "seed-0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_another_training_of_the_seed_is_named(other, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "PATIENCE_S", 0.3)
    said = rf"^run = {tmp_path}: another training works in seed-0; wait for its end, or stop it"
    with (
        pytest.raises(InputError, match=said),
        alone_with(tmp_path / "seed-0", label="second"),
    ):
        raise AssertionError("both hold it")
    waiting = f"second: waiting for another training in {tmp_path / 'seed-0'} to end"
    assert capsys.readouterr().out.splitlines() == [waiting]
    with alone_with(tmp_path / "seed-1", label="second"):  # another seed is free
        pass


def test_a_training_that_was_killed_lets_go(other, tmp_path):
    def stop() -> bool:  # asked while we wait
        other.kill()
        return False

    with alone_with(tmp_path / "seed-0", label="second", stop=stop):
        assert other.wait() < 0


def test_who_waits_can_be_stopped(other, tmp_path):
    with (
        pytest.raises(Interrupted, match=r"^second: stopped before it was begun"),
        alone_with(tmp_path / "seed-0", label="second", stop=lambda: True),
    ):
        raise AssertionError("both hold it")
