"""The train flow on a real server; the trainer is a real process."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from semix.calib.config import TrainConfig
from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.flows import launcher
from semix.flows.artifacts import artifact_key
from semix.flows.child import ChildExit
from semix.flows.launcher import (
    NO_REASON,
    Machines,
    TrainerExit,
    follow_trainer,
    launch_command,
    launcher_settings,
    pauses,
)
from semix.flows.train import train
from semix.flows.train_flow import TrainFailed, failure
from tests.calib.runs import assert_same_results
from tests.trainings import (
    SETTINGS,
    checkpoint_of,
    claimed,
    epochs_of,
    processes_on,
    train_here,
    trainer_of,
    wait_until,
    write_config,
)

QUICK = {
    "name": "quick",
    "real": {"name": "digits"},
    "model": {"name": "resnet8", "width": 2},
    "epochs": 1,
    "batch_size": 150,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "quick.yaml"
    path.write_text(json.dumps(QUICK))
    return path


def test_training_leaves_an_evaluation(latest_artifact, config, tmp_path, caplog):
    with caplog.at_level("INFO", logger="semix.train"):
        run = train(config, tmp_path / "run", overrides=["seeds=[3]"])
    lines = [record.message for record in caplog.records if record.name == "semix.train"]
    assert lines[0].startswith("quick: resnet8: ")  # not a warning of accelerate
    assert lines[1].startswith("quick seed 3 base 1/1")
    key = artifact_key("train", str(run))
    progress = latest_artifact(key)
    assert (progress["data"], progress["description"]) == (100.0, "1 of 1 seeds measured")
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    assert [(row["stage"], row["seed"]) for row in rows] == [("base", 3)]
    with pytest.raises(InputError, match=r"epochs: 1 there, 2 now"):
        train(config, run, overrides=["epochs=2"])


def test_bad_settings_start_nothing(config, tmp_path):
    with pytest.raises(InputError, match=r"^loss\.name = fedlass: did you mean fedlas_ls\? "):
        train(config, tmp_path / "run", overrides=["loss.name=fedlass"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "processes", "text"),
    [
        ([], 4, r"^batch_size = 150: 4 processes share it equally; choose a multiple of 4"),
        (
            ["accumulate=4"],
            2,
            r"^accumulate = 4: the 75 real images of a process do not",
        ),
    ],
)
def test_what_processes_cannot_share_starts_nothing(config, tmp_path, overrides, processes, text):
    with pytest.raises(InputError, match=text):
        train(config, tmp_path / "run", overrides=overrides, machines=Machines(processes))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"^out = .*/file/run: cannot be written \(Not a directory"
    ):
        train(config, tmp_path / "file" / "run")


@pytest.mark.parametrize("place", ["s3://bucket/run", Path("s3://bucket/run")])
def test_networks_are_trained_in_a_folder(config, place):
    with pytest.raises(InputError, match=r"^out = s3://bucket/run: must be a folder"):
        train(config, place)


def test_a_training_whose_gpu_torch_cannot_use_does_not_go_on_without(
    prefect_api, config, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "63")  # no machine has so many
    with pytest.raises(TrainFailed, match=r"^device = cuda: torch sees no GPU here") as caught:
        train(config, tmp_path / "run", restarts=3)
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run" / "seed-0").exists()


def test_restarts_have_a_limit(config, tmp_path):
    with pytest.raises(InputError, match=r"^restarts = 101: choose 0 to 100"):
        train(config, tmp_path / "run", restarts=101)


ENDED = "training ended: exit status 1: "
KILLED = "E1122 api.py:988] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: /bin/python"


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "text", "status", "lost"),
    [
        ("print('epoch 1'); exit(1)", f"{ENDED}{NO_REASON}\nepoch 1\ncheckp", 1, True),
        ("import lost", f"{ENDED}ModuleNotFoundError: No module named 'lost'\nTr", 1, True),
        ("print('crashed: E: x'); print(2); exit(1)", f"{ENDED}crashed: E: x\ncr", 1, True),
        (
            f"print('crashed: other'); print({KILLED!r}); print('interrupted: x'); exit(1)",
            f"{ENDED}process 1 of this machine died of signal 9 (Killed)\n",
            1,
            True,
        ),
        ("print('error: run = x: unfinished'); exit(1)", "run = x: unfinished", 2, False),
        ("print('error: a = b: c'); [print(i) for i in range(99)]; exit(1)", "a = b: c", 2, False),
        ("print('diverged: epoch 2'); exit(3)", "diverged: epoch 2; the last ch", 1, False),
        ("print('interrupted: x'); exit(1)", f"{ENDED}interrupted: x\n", 1, True),
        ("print('crashed: y'); print('error: a = b: c'); exit(1)", "a = b: c", 2, False),
    ],
)
def test_a_failed_training_says_why(code, text, status, lost):
    ended = follow_trainer([sys.executable, "-c", code], on_line=print)
    error = failure(ended)
    assert str(error).startswith(text)
    assert error.exit_status == status
    assert ended.is_lost == lost


def test_no_other_is_trained_beside_one_that_cannot_be_ended():
    ended = TrainerExit(ChildExit(7, -9, hung=False, stuck=True, last_lines=()), [])
    assert str(failure(ended)).startswith("training ended: process 7 is stuck in the kernel; SIG")
    assert not ended.is_lost


def test_pauses_between_restarts_grow_up_to_ten_minutes():
    assert pauses(0) == []
    assert pauses(3) == [10, 20, 40]
    assert pauses(100)[-1] == 600


@pytest.mark.process
def test_a_trainer_that_ended_well_is_not_lost():
    assert not follow_trainer([sys.executable, "-c", "print('error: x')"], on_line=print).is_lost


# Trainers that are stopped, killed and started again: nothing that was trained is lost


CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    run = claimed(tmp_path_factory.mktemp("unbroken") / "run").parent
    return train_here(run)


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), **changes}


def test_sigterm_to_semix_stops_the_trainer_after_a_step(prefect_api, unbroken, tmp_path):
    config, run = write_config(tmp_path / "long.yaml"), tmp_path / "run"
    command = [sys.executable, "-m", "semix.flows.cli", "train", str(config), "--out", str(run)]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            command, env=environment(PREFECT_API_URL=prefect_api), stdout=log, stderr=log
        )
        wait_until(lambda: epochs_of(run) or process.poll() is not None)
        process.terminate()
        status = process.wait(150)
        log.seek(0)
        text = log.read()
    assert status == 143, text
    assert "stopped; the training is in a checkpoint, and the same command goes on" in text
    assert checkpoint_of(run).state["position"] < SETTINGS["epochs"]  # it was not through
    assert not processes_on(run)
    assert_same_results_here(unbroken, train_here(run))


@pytest.mark.process
def test_a_trainer_whose_flow_is_killed_writes_a_checkpoint_and_ends(unbroken, tmp_path):
    run = claimed(tmp_path / "run").parent
    settings = launcher_settings(load_settings(TrainConfig, QUICK), Machines())
    (tmp_path / "accelerate.json").write_text(json.dumps(settings))
    trainer = ["--config", str(run / "config.json")]
    command = launch_command(tmp_path / "accelerate.json", trainer, num_processes=1)
    code = f"from semix.flows.child import supervise; supervise({command}, on_line=print)"
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment())
    wait_until(lambda: epochs_of(run) or parent.poll() is not None)
    parent.kill()
    parent.wait()
    wait_until(lambda: not processes_on(run))
    assert checkpoint_of(run).state["position"] < SETTINGS["epochs"]  # it was not through
    assert_same_results_here(unbroken, train_here(run))


def test_a_trainer_that_was_killed_is_started_again_by_itself(
    prefect_api, unbroken, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.5)
    config, run = write_config(tmp_path / "long.yaml"), tmp_path / "run"

    def kill() -> None:
        wait_until(lambda: epochs_of(run))
        trainer_of(run).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with caplog.at_level(logging.INFO, logger="semix.train"):
        train(config, run, restarts=1)
    killer.join()
    assert "; started again in 0 s, from the last checkpoint" in caplog.text
    assert_same_results_here(unbroken, run)


def assert_same_results_here(unbroken: Path, run: Path) -> None:
    assert_same_results(unbroken, run, weights=("model.safetensors", "logits-base.safetensors"))
