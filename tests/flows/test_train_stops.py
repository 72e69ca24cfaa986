"""Trainers that are stopped, killed and started again: nothing that was trained is lost."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from calib.config import TrainConfig
from data.settings import load_settings
from flows import train_flow as module
from flows.launcher import Machines, launch_command, launcher_settings
from flows.train import train
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

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    run = claimed(tmp_path_factory.mktemp("unbroken") / "run").parent
    return train_here(run)


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), **changes}


def test_sigterm_to_semix_stops_the_trainer_after_a_step(prefect_api, unbroken, tmp_path):
    config, run = write_config(tmp_path / "long.yaml"), tmp_path / "run"
    command = [sys.executable, "-m", "flows.cli", "train", str(config), "--out", str(run)]
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
    assert "stopped; what is trained is in a checkpoint, and the same command goes on" in text
    assert checkpoint_of(run).state["position"] < SETTINGS["epochs"]  # it was not through
    assert not processes_on(run)
    assert_same_results_here(unbroken, train_here(run))


@pytest.mark.process
def test_a_trainer_whose_flow_is_killed_writes_a_checkpoint_and_ends(unbroken, tmp_path):
    run = claimed(tmp_path / "run").parent
    settings = launcher_settings(load_settings(TrainConfig, SETTINGS), Machines())
    (tmp_path / "accelerate.json").write_text(json.dumps(settings))
    trainer = ["--config", str(run / "config.json")]
    command = launch_command(tmp_path / "accelerate.json", trainer, num_processes=1)
    code = f"from flows.child import supervise; supervise({command}, on_line=print)"
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
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.5)
    config, run = write_config(tmp_path / "long.yaml"), tmp_path / "run"

    def kill() -> None:
        wait_until(lambda: epochs_of(run))
        trainer_of(run).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with caplog.at_level(logging.INFO, logger="semix.train"):
        train(config, run, restarts=1)
    killer.join()
    assert "restart 1 of 1, from the last checkpoint" in caplog.text
    assert_same_results_here(unbroken, run)


def assert_same_results_here(unbroken: Path, run: Path) -> None:
    assert_same_results(unbroken, run, weights=("model.safetensors", "logits-base.safetensors"))
