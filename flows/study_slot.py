"""A slot of a study: a Prefect task that trains one run after another, a process each."""

import json
import logging
import os
import tempfile
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from prefect import task

from calib.config import TrainConfig
from calib.run_folder import CONFIG
from calib.study import Job, take_over
from calib.study.failures import note_failure
from data.errors import InputError
from data.settings import load_settings
from flows.gpus import settled_device, visible_gpus
from flows.launcher import (
    DIVERGENCE,
    GRACE_S,
    REFUSAL,
    how_it_ended,
    last_word,
    launch_command,
    launcher_settings,
    most_telling,
)
from flows.slots.slot import RECORD
from flows.supervise import Outcome, supervise

log = logging.getLogger("semix.study")


@task(task_run_name="slot {slot}", **RECORD)
def work(
    slot: int,
    out: Path,
    jobs: "SimpleQueue[Job]",
    *,
    slots: int,
    stop: threading.Event,
    ended: "SimpleQueue[str]",
) -> dict[str, Any]:
    """Take jobs and train their runs, one process at a time; `stop` ends it early.

    Args:
        ended: takes the run of every training that ended.
    """
    gpus = visible_gpus()
    environment = {"TQDM_DISABLE": "1"}  # no bars as lines in a log
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    done = []
    while not stop.is_set():
        try:
            job = jobs.get_nowait()
        except Empty:
            break
        for run in job.runs:
            if not stop.is_set():
                train(out / run, job, slots=slots, environment=environment, stop=stop)
                done.append(run)
                ended.put(run)
    return {"slot": slot, "runs": done}


def train(
    run: Path, job: Job, *, slots: int, environment: dict[str, str], stop: threading.Event
) -> None:
    """Train some seeds of a run; a failure is noted in its folder and goes no further."""
    name = f"{run.parent.name}/{run.name}"
    try:
        for seed in job.seeds:
            if sibling := take_over(run, seed=seed):
                log.info("%s seed %d: has the first stage of %s", name, seed, sibling.name)
        outcome, reason = _launch(run, job, slots=slots, environment=environment, stop=stop)
    except (InputError, OSError) as error:
        note_failure(run, str(error), last_lines=[])
        log.error("%s: %s", name, error)
        return
    if outcome.returncode != 0 and not stop.is_set():
        note_failure(run, reason, last_lines=outcome.last_lines)
        log.error("%s: %s", name, reason)


def _launch(
    run: Path, job: Job, *, slots: int, environment: dict[str, str], stop: threading.Event
) -> tuple[Outcome, str]:
    """How it ended, and the same in one line: what the trainer refused or met."""
    name, words = f"{run.parent.name}/{run.name}", list[str]()

    def on_line(line: str) -> None:
        words.extend(last_word(line))
        log.info("%s: %s", name, line)

    seeds = [f"--seeds={','.join(map(str, job.seeds))}"] if job.split else []
    with tempfile.TemporaryDirectory(prefix="semix-") as folder:
        launcher = Path(folder) / "accelerate.json"
        launcher.write_text(json.dumps(launcher_settings(settings_of(run), 1)))
        device = settled_device("auto", {**os.environ, **environment})
        trainer = ["--config", str(run / CONFIG), f"--device={device}", "--resume", *seeds]
        # Trainers beside each other share the machine's cores, as processes of one would.
        command = launch_command(launcher, trainer, num_processes=slots)
        outcome = supervise(
            command, on_line=on_line, environment=environment, stop=stop, grace_s=GRACE_S
        )
    word = most_telling(words)
    if word.startswith((REFUSAL, DIVERGENCE)):
        return outcome, word.removeprefix(REFUSAL)
    return outcome, how_it_ended(outcome, words)


def settings_of(run: Path) -> TrainConfig:
    return load_settings(TrainConfig, run / CONFIG)
