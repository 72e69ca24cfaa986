"""A slot of a study: a Prefect task that trains one run after another, a process each."""

import logging
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from prefect import task

from calib.config import TrainConfig
from calib.run_folder import CONFIG
from calib.study import Job, note_failure, take_over
from data.settings import load_settings
from flows.gpus import CHOSEN, gpu_fault
from flows.launcher import (
    DIVERGENCE,
    GRACE_S,
    REFUSAL,
    how_it_ended,
    last_word,
    launch_command,
    most_telling,
    write_launcher,
)
from flows.machines import Device, Machines
from flows.slots.slot import RECORD
from flows.slots.workers_here import quiet
from flows.study_jobs import Jobs
from flows.supervise import Outcome, supervise

log = logging.getLogger("semix.study")


class SlotLost(RuntimeError):
    """A slot's GPU does not work any more; other slots take its trainings."""


@task(task_run_name="slot {slot}", **RECORD)
def work(
    slot: int,
    out: Path,
    jobs: Jobs,
    *,
    slots: int,
    environment: Mapping[str, str],
    stop: threading.Event,
    ended: "SimpleQueue[str]",
) -> dict[str, Any]:
    """Take jobs and train their runs, one process at a time; `stop` ends it early.

    Args:
        environment: changes to our own: its GPU, if there is one for it.
        ended: takes the run of every training that ended.
    Raises:
        SlotLost: a training failed, and its GPU does not work; what is left of the job is back
            among the others.
    """
    done: list[str] = []
    while not stop.is_set() and (job := jobs.take(stop)):
        rest = None
        try:
            for place, run in enumerate(job.runs):
                if stop.is_set():
                    break
                failure = train(out / run, job, slots=slots, environment=environment, stop=stop)
                # On a GPU that is gone all that is left would fail, one after the other.
                if failure and environment and (fault := gpu_fault(environment, stop)):
                    rest, gpu = replace(job, runs=job.runs[place:]), environment[CHOSEN]
                    text = f"slot {slot}: GPU {gpu} does not work: {fault}"
                    log.error("%s; other slots take its trainings", text)
                    raise SlotLost(f"{text}; {run}: {failure.reason}")
                if failure:
                    note(out / run, failure)
                done.append(run)
                ended.put(run)
        finally:
            jobs.end(rest)
    return {"slot": slot, "runs": done}


@dataclass(frozen=True)
class Failure:
    """Why a run is not trained, in one line, and what its trainer said last."""

    reason: str
    last_lines: Sequence[str] = ()


def note(run: Path, failure: Failure) -> None:
    """In its folder, if that can be written."""
    try:
        note_failure(run, failure.reason, last_lines=failure.last_lines)
    except OSError as error:
        log.warning("%s: why it failed is not written down: %s", run, error)


def train(
    run: Path, job: Job, *, slots: int, environment: Mapping[str, str], stop: threading.Event
) -> Failure | None:
    """Train some seeds of a run."""
    name = f"{run.parent.name}/{run.name}"
    try:
        for seed in job.seeds:
            if sibling := take_over(run, seed=seed):
                log.info("%s seed %d: has the first stage of %s", name, seed, sibling.name)
        outcome, reason = _launch(run, job, slots=slots, environment=environment, stop=stop)
    except Exception as error:  # a damaged file of one run must not end the slot of all others
        log.error("%s: %s", name, error)
        return Failure(str(error) or type(error).__name__)
    if outcome.returncode == 0 or stop.is_set():
        return None
    log.error("%s: %s", name, reason)
    return Failure(reason, outcome.last_lines)


def _launch(
    run: Path, job: Job, *, slots: int, environment: Mapping[str, str], stop: threading.Event
) -> tuple[Outcome, str]:
    """How it ended, and the same in one line: what the trainer refused or met."""
    name, words = f"{run.parent.name}/{run.name}", list[str]()

    def on_line(line: str) -> None:
        words.extend(last_word(line))
        log.info("%s: %s", name, line)

    seeds = [f"--seeds={','.join(map(str, job.seeds))}"] if job.split else []
    device: Device = "cuda" if environment else "auto"
    with tempfile.TemporaryDirectory(prefix="semix-") as folder:
        launcher = write_launcher(settings_of(run), Path(folder), Machines(device=device))
        trainer = ["--config", str(run / CONFIG), f"--device={device}", *seeds]
        # Trainers beside each other share the machine's cores, as processes of one would.
        command = launch_command(launcher, trainer, num_processes=slots)
        outcome = supervise(
            command,
            on_line=on_line,
            environment={**quiet(), **environment},
            stop=stop,
            grace_s=GRACE_S,
        )
    word = most_telling(words)
    if word.startswith((REFUSAL, DIVERGENCE)):
        return outcome, word.removeprefix(REFUSAL)
    return outcome, how_it_ended(outcome, words)


def settings_of(run: Path) -> TrainConfig:
    return load_settings(TrainConfig, run / CONFIG)
