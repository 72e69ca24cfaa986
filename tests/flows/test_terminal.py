"""Logs, progress and findings on a terminal; no work depends on them."""

import io
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from semix.data.root import RecordTotals, RootProgress
from semix.flows.commands.making import next_commands
from semix.flows.progress import Steps, derived_metrics, describe, progress_display
from semix.flows.terminal import details_in, print_findings, set_up_logging
from tests.command import semix
from tests.handmade import make_root

CHECKOUT = Path(__file__).parents[2]
NONE = RootProgress(
    shards=9,
    done=0,
    failed=0,
    groups=135,
    groups_done=0,
    images=1080,
    images_done=0,
)
CODE = """
import logging
from semix.flows.terminal import set_up_logging
set_up_logging()
for line in range(3):
    logging.getLogger("semix.train").info("epoch %d", line)
print("went on")
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that Linux has")
def test_a_log_on_a_full_disk_ends_no_work():
    with Path("/dev/full").open("w") as full:
        completed = subprocess.run(
            [sys.executable, "-c", CODE], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=full
        )
    assert completed.stdout == b"went on\n"


def test_details_go_to_a_file_while_the_screen_is_anothers(tmp_path, capsys):
    set_up_logging()
    with details_in(tmp_path / "details.log"):
        logging.getLogger("semix.train").info("epoch 1")
    logging.getLogger("semix.train").info("afterwards")
    assert (tmp_path / "details.log").read_text().endswith("epoch 1\n")
    output = capsys.readouterr().err
    assert "epoch 1" not in output
    assert "afterwards" in output


def test_a_builds_lines_count_images(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr("semix.flows.progress.time.monotonic", lambda: now)
    with caplog.at_level(logging.INFO, logger="semix.build"), progress_display("generate") as show:
        for images, now in ((0, 20.0), (128, 40.0), (384, 60.0)):  # noqa: B007 - the clock has it
            show(replace(NONE, done=images // 128, images_done=images))
    assert caplog.messages == [
        "generate: 0 of 1,080 images",
        "generate: 128 of 1,080 images",
        "generate: 384 of 1,080 images, 12.8 images/s, about 54 s left",
    ]


def test_series_left_out_are_not_waited_for():
    """A plan of 9 shards of 15 series of 8 images, whose second shard lacks two series."""
    unfinished = replace(NONE, done=2, groups_done=30, images_done=240)
    totals = RecordTotals(left_out=2, seconds=112.0, stages={})
    assert describe(unfinished, 2.0) == "2 images/s, about 7 min left"  # 840 images
    metrics = derived_metrics(unfinished, totals)  # 224 images in 112 s
    assert (metrics["images_per_second"], metrics["worker_seconds_left"]) == (2.0, 420.0)
    complete = replace(unfinished, done=9, groups_done=135, images_done=1080)
    assert describe(complete, 2.0) == "2 images/s"
    assert derived_metrics(complete, totals)["worker_seconds_left"] == 0.0
    assert describe(NONE, None) == ""


def test_what_each_seed_has_to_warn_of_is_said_once_a_command(capsys):
    for _ in range(2):
        set_up_logging()
        for images in (5, 6):
            logging.getLogger("semix.calib").warning("%d images are too few", images)
            logging.getLogger("semix.data").warning("%s", "7 pictures are left out")
            logging.getLogger("semix.build").warning("a worker was lost")
        messages = [line[9:] for line in capsys.readouterr().err.splitlines()]
        lost = "warning: a worker was lost"  # an event, each time
        few = ["warning: 5 images are too few", "warning: 7 pictures are left out"]
        assert messages == [*few, lost, lost]


def test_what_the_quickstart_suggests_writes_into_its_folder_or_what_git_ignores():
    commands = [line.partition("    ")[0].split() for line in next_commands(Path("quickstart"))]
    assert [command[1] for command in commands] == ["audit", "show", "evaluate"]
    assert commands[1][-2:] == ["--out", "quickstart/series-40.png"]


def test_a_bar_counts_images_too(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("semix.flows.progress.console", screen)
    with progress_display("generate") as show:
        show(replace(NONE, done=3, images_done=384))
    assert "384 of 1,080 images" in screen.file.getvalue()


def test_time_left_follows_the_pace_of_what_has_ended(monkeypatch, capsys):
    clock = iter([0.0, 20.0, 20.0, 25.0, 25.0, 25.0])
    monkeypatch.setattr("semix.flows.progress.time.monotonic", lambda: next(clock))
    steps = Steps({"models": 10.0, "trainings": 30.0})
    with steps.step("models"):  # twice what was expected
        pass
    assert capsys.readouterr().err.endswith("models: 20 s; about 1 min left\n")
    with steps.step("trainings"):
        assert steps.left() == 55.0


def test_what_may_be_copied_is_whole_on_a_narrow_screen(tmp_path):
    path = tmp_path / "a-place-with-a-name-that-no-column-of-a-table-holds" / "mixed"
    root = make_root(path)
    narrow = {"COLUMNS": "60"}
    assert str(path) in semix("doctor", "--out", str(path), **narrow)[1]
    Path(path, root.record(0).tar).unlink()
    assert f"`semix resume {path}`" in semix("verify", str(path), **narrow)[1]
    digest = root.plan.digest
    assert digest in semix("status", str(path), **narrow)[1]


def test_a_remedy_stands_below_what_was_found(capsys):
    rows = [("disk", "failed", "[1 GB] free", "choose another place"), ("clock", "ok", "fine", "")]
    print_findings(rows, {"failed": "red", "ok": "green"})
    assert capsys.readouterr().out.splitlines() == [
        "disk   failed  [1 GB] free",
        "    choose another place",
        "clock  ok      fine",
    ]
