"""What a person sees is never what work depends on."""

import io
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from data.progress import progress_of
from data.sums import Sums
from flows.progress import Steps, shown
from flows.terminal import details_in, print_findings, set_up_logging
from tests.command import semix
from tests.handmade import make_root

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


def test_a_builds_lines_count_images(monkeypatch, caplog):
    plan = {"images_per_group": 8, "num_groups": 135, "num_shards": 9}
    none = progress_of(plan, Sums(), failed=0)
    clock = iter([0.0, 20.0, 40.0, 60.0])
    monkeypatch.setattr("flows.progress.time.monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, logger="semix.build"), shown("generate") as show:
        for images in (0, 128, 384):
            show(replace(none, done=images // 128, images_done=images))
    assert caplog.messages == [
        "generate: 0 of 1,080 images",
        "generate: 128 of 1,080 images",
        "generate: 384 of 1,080 images, 12.8 images/s, about 54 s left",
    ]


def test_a_bar_counts_images_too(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("flows.progress.console", screen)
    plan = {"images_per_group": 8, "num_groups": 135, "num_shards": 9}
    with shown("generate") as show:
        show(replace(progress_of(plan, Sums(), failed=0), done=3, images_done=384))
    assert "384 of 1,080 images" in screen.file.getvalue()


def test_time_left_follows_the_pace_of_what_has_ended(monkeypatch, capsys):
    clock = iter([0.0, 20.0, 20.0, 25.0, 25.0, 25.0])
    monkeypatch.setattr("flows.progress.time.monotonic", lambda: next(clock))
    steps = Steps({"models": 10.0, "trainings": 30.0})
    with steps.step("models"):  # twice what was expected
        pass
    assert capsys.readouterr().err.endswith("models: 20 s; about 60 s left\n")
    with steps.step("trainings"):
        assert steps.left() == 55.0


def test_what_may_be_copied_is_whole_on_a_narrow_screen(tmp_path):
    place = tmp_path / "a-place-with-a-name-that-no-column-of-a-table-holds" / "mixed"
    root = make_root(place)
    narrow = {"COLUMNS": "60"}
    assert str(place) in semix("doctor", "--out", str(place), **narrow)[1]
    Path(place, root.record(0)["tar"]).unlink()
    assert f"`semix resume {place}`" in semix("verify", str(place), **narrow)[1]
    digest = root.plan["digest"]
    assert digest in semix("status", str(place), **narrow)[1]


def test_a_remedy_stands_below_what_was_found(capsys):
    rows = [("disk", "failed", "[1 GB] free", "choose another place"), ("clock", "ok", "fine", "")]
    print_findings(rows, {"failed": "red", "ok": "green"})
    assert capsys.readouterr().out.splitlines() == [
        "disk   failed  [1 GB] free",
        "    choose another place",
        "clock  ok      fine",
    ]
