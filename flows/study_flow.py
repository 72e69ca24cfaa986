"""The Prefect study flow: one task a slot, which takes jobs until none is left."""

import json
import logging
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.task_runners import ThreadPoolTaskRunner

from calib.config import TrainConfig
from calib.run_folder import CONFIG, is_measured
from calib.study import Job, take_over
from calib.study.failures import failure_of, forget_failure, note_failure
from data.errors import InputError
from data.settings import load_settings
from flows.gpus import visible_gpus
from flows.slot import RECORD
from flows.study import StudyFailed, failure_message
from flows.supervise import Outcome, supervise
from flows.train_flow import DIVERGENCE, GRACE_S, REFUSAL, launch_command, launcher_settings

LOOK_EVERY_S = 1.0

log = logging.getLogger("semix.study")


def run_study(out: Path, jobs: Sequence[Job], *, slots: int, name: str) -> None:
    """Run the flow under a name that a person recognises; see `study_flow`."""
    runs = len({run for job in jobs for run in job.runs})
    runner: Any = ThreadPoolTaskRunner(max_workers=slots)
    named = study_flow.with_options(flow_run_name=f"{name}, {runs} runs", task_runner=runner)
    named(str(out), list(jobs), slots)


@flow(name="semix study", persist_result=False, result_serializer="json")
def study_flow(out: str, jobs: list[Job], slots: int) -> None:
    """Train and measure the runs of all jobs.

    Raises:
        StudyFailed: a run is not measured; names each, and why.
    """
    place, runs = Path(out), list(dict.fromkeys(run for job in jobs for run in job.runs))
    queue: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    for run in runs:
        forget_failure(place / run)
    stop = threading.Event()
    try:
        futures: list[Any] = [
            work.submit(slot, place, queue, slots=slots, stop=stop) for slot in range(slots)
        ]
        pending = {future.wrapped_future for future in futures}
        while pending:
            pending = wait(pending, timeout=LOOK_EVERY_S).not_done
    finally:
        stop.set()  # an interrupt passes here; the flow ends when its trainers have
    results = [future.result(raise_on_failure=False) for future in futures]
    refuse_gaps(place, runs, errors=[str(r) for r in results if isinstance(r, Exception)])


def refuse_gaps(out: Path, runs: Sequence[str], *, errors: Sequence[str]) -> None:
    """Raises StudyFailed for the runs that are not measured, whatever the tasks say.

    Args:
        errors: of the slots, which say why runs were not even begun.
    """
    missing = {
        run: failure_of(out / run) or "; ".join(errors) or "not run"
        for run in runs
        if not is_measured(_settings(out / run), out / run)
    }
    if missing:
        raise StudyFailed(failure_message(missing, cells=len(runs), out=out))


@task(task_run_name="slot {slot}", **RECORD)
def work(
    slot: int, out: Path, jobs: "SimpleQueue[Job]", *, slots: int, stop: threading.Event
) -> dict[str, Any]:
    """Take jobs and train their runs, one process at a time; `stop` ends it early."""
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
        outcome = _launch(run, job, slots=slots, environment=environment, stop=stop)
    except (InputError, OSError) as error:
        note_failure(run, str(error), last_lines=[])
        log.error("%s: %s", name, error)
        return
    if outcome.returncode != 0 and not stop.is_set():
        note_failure(run, _reason(outcome), last_lines=outcome.last_lines)
        log.error("%s: %s", name, _reason(outcome))


def _launch(
    run: Path, job: Job, *, slots: int, environment: dict[str, str], stop: threading.Event
) -> Outcome:
    name, run_log = f"{run.parent.name}/{run.name}", get_run_logger()

    def on_line(line: str) -> None:
        run_log.info("%s: %s", name, line)
        log.info("%s: %s", name, line)

    seeds = [f"--seeds={','.join(map(str, job.seeds))}"] if job.split else []
    with tempfile.TemporaryDirectory(prefix="semix-") as folder:
        launcher = Path(folder) / "accelerate.json"
        launcher.write_text(json.dumps(launcher_settings(_settings(run), 1)))
        trainer = ["--config", str(run / CONFIG), "--resume", *seeds]
        # Trainers beside each other share the machine's cores, as processes of one would.
        command = launch_command(launcher, trainer, num_processes=slots)
        return supervise(
            command, on_line=on_line, environment=environment, stop=stop, grace_s=GRACE_S
        )


def _reason(outcome: Outcome) -> str:
    """One line: what the trainer refused or met, or how it ended and the last thing it said."""
    words = [line for line in outcome.last_lines if line.startswith((REFUSAL, DIVERGENCE))]
    if words:
        return words[-1].removeprefix(REFUSAL)
    return f"{outcome}: {outcome.last_lines[-1]}" if outcome.last_lines else str(outcome)


def _settings(run: Path) -> TrainConfig:
    return load_settings(TrainConfig, run / CONFIG)
