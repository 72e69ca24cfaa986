"""Small trainings in real processes, long enough to be stopped within an epoch."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from semix.calib.checkpoint import Checkpoint, latest_checkpoint
from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run
from semix.calib.train import train_run
from semix.data.settings import load_settings

SETTINGS = {
    "name": "long",
    "real": {"name": "digits", "image_size": 16, "train_per_class": 20},
    "model": {"name": "resnet8", "width": 2},
    "loss": {"name": "fedlas_ls"},
    "epochs": 4,
    "batch_size": 2,  # 100 steps per epoch
    "augment": {"shift": 1},
    "evaluation": {"bootstrap": 50},
}


def write_config(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**SETTINGS, **changes}))
    return path


def claimed(run: Path, **changes: object) -> Path:
    """Create a run folder with these settings; returns its config.json."""
    return claim_run(load_settings(TrainConfig, {**SETTINGS, **changes}), run)


def train_here(run: Path) -> Path:
    """Train in this process, as a trainer with one thread does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train_run(run)
    finally:
        torch.set_num_threads(threads)
    return run


def wait_until(condition: Callable[[], object], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def epochs_of(run: Path) -> int:
    path = run / "seed-0" / "history.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def checkpoint_of(run: Path) -> Checkpoint | None:
    return latest_checkpoint(run / "seed-0" / "checkpoint")


def processes_on(run: Path) -> list[psutil.Process]:
    """Launchers and trainers of a run, whichever process started them."""
    processes = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        is_on_run = str(run / "config.json") in command and process.pid != os.getpid()
        if is_on_run and process.info["status"] != psutil.STATUS_ZOMBIE:
            processes.append(process)
    return processes


def trainer_of(run: Path) -> psutil.Process:
    """The process that trains, which is the youngest of the run's."""
    return max(processes_on(run), key=lambda process: process.create_time())
