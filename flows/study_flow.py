"""The Prefect study flow: one task a slot, which takes jobs until none is left."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from calib.run_folder import is_measured
from calib.study import Cell, Job, StudyConfig, failure_of, forget_failure, plan_jobs
from calib.study_tables import write_study
from flows import parameters as p
from flows.artifacts import artifact_key, growing_artifact, link_to, markdown_file
from flows.configs import load_config
from flows.flow_runs import flow_options, name_of, running
from flows.gpus import visible_gpus
from flows.places import training_folder
from flows.slots.settings import MOST_SLOTS
from flows.slots.slot import RECORD
from flows.slots.workers_here import own_gpu
from flows.study import StudyFailed, failure_message, prepared
from flows.study_jobs import Jobs
from flows.study_slot import settings_of, work

LOOK_EVERY_S = 1.0
RUNNER: Any = ThreadPoolTaskRunner(max_workers=MOST_SLOTS)


def run_name(given: Mapping[str, Any]) -> str:
    """`study study-digits into digits, only */ce`."""
    cells = f", only {' '.join(given['only'])}" if given["only"] else ""
    return f"study {Path(given['config']).stem} into {name_of(given['out'])}{cells[:80]}"


@flow(**flow_options("study", run_name), task_runner=RUNNER)
def study_flow(
    config: p.StudyConfigFile,
    out: p.StudyFolder,
    overrides: p.Overrides = [],  # noqa: B006 - Prefect copies it
    slots: p.Trainers = 0,
    only: p.Cells = [],  # noqa: B006
) -> dict[str, Any]:
    """Train and measure every cell of a study that is not measured, then write its tables.

    Start it again at any time: measured cells are kept, interrupted ones go on.
    """
    with running("study"):
        place = training_folder(out)
        settings = load_config(StudyConfig, config, overrides)
        cells, todo = prepared(settings, place, slots=slots, only=only)
        gpus, failed = visible_gpus(), None  # asked once: a lost one may silence the driver
        count = slots or max(1, len(gpus))
        try:
            with trainings(plan_jobs(todo, slots=count), place, slots=count, gpus=gpus):
                pass
        except StudyFailed as error:
            failed = error
        record = write_tables(settings, cells, place)
        if failed is not None:
            raise failed
        return {"study": str(place / "study.json"), "missing": len(record["missing"])}


@contextmanager
def trainings(jobs: Sequence[Job], out: Path, *, slots: int, gpus: Sequence[str]) -> Iterator[None]:
    """Train and measure the runs of all jobs, beside what the block does.

    Args:
        gpus: shared out among the slots.
    Raises:
        StudyFailed: a run is not measured; names each, and why.
    """
    runs = list(dict.fromkeys(run for job in jobs for run in job.runs))
    queue, ended = Jobs(jobs), SimpleQueue[str]()
    for run in runs:
        forget_failure(out / run)
    stop = threading.Event()
    slots = min(slots, len(jobs))
    try:
        futures: list[Any] = [
            work.submit(
                slot,
                out,
                queue,
                slots=slots,
                environment=own_gpu(slot, gpus),
                stop=stop,
                ended=ended,
            )
            for slot in range(slots)
        ]
        yield
        follow(futures, ended, sum(len(job.runs) for job in jobs), out=out)
    finally:
        stop.set()  # an interrupt passes here; the flow ends when its trainers have
    results = [future.result(raise_on_failure=False) for future in futures]
    refuse_gaps(out, runs, errors=[str(r) for r in results if isinstance(r, Exception)])


def follow(futures: Sequence[Any], ended: "SimpleQueue[str]", trainings: int, *, out: Path) -> None:
    """Show how many trainings have ended, until every slot has."""
    pending = {future.wrapped_future for future in futures}
    with growing_artifact(artifact_key("study", str(out))) as publish:
        while pending:
            pending = wait(pending, timeout=LOOK_EVERY_S).not_done
            done = ended.qsize()
            publish(done / max(1, trainings), f"{done} of {trainings} trainings ended")


@task(task_run_name="tables", **RECORD)
def write_tables(settings: StudyConfig, cells: Sequence[Cell], out: Path) -> dict[str, Any]:
    record = write_study(settings, cells, out)
    key = artifact_key("study", str(out))
    markdown_file(out / "study.md", key=key)
    link_to(out / "study.md", key=key)
    return record


def refuse_gaps(out: Path, runs: Sequence[str], *, errors: Sequence[str]) -> None:
    """Raises StudyFailed for the runs that are not measured, whatever the tasks say.

    Args:
        errors: of the slots, which say why runs were not even begun.
    """
    missing = {
        run: failure_of(out / run) or "; ".join(errors) or "not run"
        for run in runs
        if not is_measured(settings_of(out / run), out / run)
    }
    if missing:
        raise StudyFailed(failure_message(missing, cells=len(runs), out=out))
