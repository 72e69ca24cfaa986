"""What a person sees is never what work depends on."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from flows.progress import Steps
from flows.terminal import details_in, set_up_logging

CHECKOUT = Path(__file__).parents[2]
CODE = """
import logging
from flows.terminal import set_up_logging
set_up_logging()
for line in range(3):
    logging.getLogger("semix.train").info("epoch %d", line)
print("went on")
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that Linux has")
def test_a_log_on_a_full_disk_ends_no_work():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", CODE], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=full
        )
    assert ended.stdout == b"went on\n"


def test_details_go_to_a_file_while_the_screen_is_anothers(tmp_path, capsys):
    set_up_logging()
    with details_in(tmp_path / "details.log"):
        logging.getLogger("semix.train").info("epoch 1")
    logging.getLogger("semix.train").info("afterwards")
    assert (tmp_path / "details.log").read_text().endswith("epoch 1\n")
    shown = capsys.readouterr().err
    assert "epoch 1" not in shown
    assert "afterwards" in shown


def test_time_left_follows_the_pace_of_what_has_ended(monkeypatch, capsys):
    clock = iter([0.0, 20.0, 20.0, 25.0, 25.0, 25.0])
    monkeypatch.setattr("flows.progress.time.monotonic", lambda: next(clock))
    steps = Steps({"models": 10.0, "trainings": 30.0})
    with steps.step("models"):  # twice what was expected
        pass
    assert capsys.readouterr().err.endswith("models: 20 s; about 60 s left\n")
    with steps.step("trainings"):
        assert steps.left() == 55.0
