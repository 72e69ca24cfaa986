"""The Prefect study flow: one task per slot, which runs jobs until the queue is empty."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from semix.calib.config import TrainConfig
from semix.calib.run_folder import CONFIG, is_measured
from semix.calib.study import Cell, StudyConfig
from semix.calib.study_jobs import (
    Job,
    copy_first_stage,
    failure_of,
    forget_failure,
    note_failure,
    plan_jobs,
)
from semix.calib.study_tables import write_study
from semix.data.settings import load_settings
from semix.data.splits import RealDataConfig
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, growing_artifact, link_to, markdown_file
from semix.flows.build_flow import build_flow
from semix.flows.calling import from_caller
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.gpus import VISIBLE_DEVICES, gpu_fault, visible_gpus
from semix.flows.launcher import Machines, run_trainer
from semix.flows.paths import training_folder
from semix.flows.slots import MAX_SLOTS, QUIET, SlotSettings, own_gpu, prepare_workers
from semix.flows.slots.slot import RECORD
from semix.flows.study import PreparedStudy, StudyFailed, failure_message, prepare_study
from semix.flows.study_builds import (
    MixedPlan,
    is_built,
    models_for,
    open_mixed_root,
    write_mixed_csv,
)
from semix.pipeline.standins import StandIns

LOOK_EVERY_S = 1.0
RUNNER: Any = ThreadPoolTaskRunner(max_workers=MAX_SLOTS)

log = logging.getLogger("semix.study")


def run_name(parameters: Mapping[str, Any]) -> str:
    """`study study-digits into digits, only */ce`."""
    cells = f", only {' '.join(parameters['only'])}" if parameters["only"] else ""
    return (
        f"study {Path(parameters['config']).stem} into {base_name(parameters['out'])}{cells[:80]}"
    )


@flow(**flow_options("study", run_name), task_runner=RUNNER)
def study_flow(
    config: p.Config,
    out: p.StudyFolder,
    overrides: p.StudyOverrides = [],  # noqa: B006 - Prefect copies it
    slots: p.Trainers = 0,
    only: p.Cells = [],  # noqa: B006
    restarts: p.Restarts = 0,
) -> dict[str, Any]:
    """Train and measure every cell of a study that is not measured, then write its tables.

    Its mixed datasets are built first. Start it again at any time: measured cells stay, and
    interrupted ones go on.
    """
    with run_context("study"):
        folder = training_folder(out)
        prepared = from_caller(PreparedStudy) or prepare_study(
            config, folder, overrides, slots=slots, only=only, restarts=restarts
        )
        gpus, failed = visible_gpus(), None  # listed once: a GPU lost later may block the driver
        count = slots or max(1, len(gpus))
        make_mixed(prepared, folder, slots=count)
        jobs = plan_jobs(prepared.todo, slots=count)
        try:
            with run_jobs(jobs, folder, slots=count, gpus=gpus, restarts=restarts):
                pass
        except StudyFailed as error:
            failed = error
        record = write_tables(prepared.settings, prepared.cells, folder)
        if failed is not None:
            raise failed
        return {"study": str(folder / "study.json"), "missing": len(record["missing"])}


def make_mixed(prepared: PreparedStudy, out: Path, *, slots: int) -> None:
    """Build the mixed datasets of the cells, one after the other, each by the build flow."""
    urls = {cell.config.mixed.url for cell in prepared.todo if cell.config.mixed is not None}
    plans = [plan for plan in prepared.mixed if plan.url in urls or is_built(plan)]
    models: dict[RealDataConfig, StandIns | None] = {}  # once per split
    for plan in plans:
        if prepared.settings.standins and plan.real not in models:
            models[plan.real] = small_models(plan, prepared, out)
        root, config = open_mixed_root(plan, models.get(plan.real))
        if not is_built(plan):
            with prepare_workers(SlotSettings(slots), url=root.url):
                build_flow(out=root.url, config=str(config), slots=slots)
    if plans:
        write_mixed_csv(plans, out)


@task(task_run_name="small models", **RECORD)
def small_models(plan: MixedPlan, prepared: PreparedStudy, out: Path) -> StandIns | None:
    """Small models of the split's training images, trained unless they exist."""
    device = "cuda" if visible_gpus() else "cpu"
    return models_for(plan, prepared.mixed, prepared.settings, out, device=device)


@contextmanager
def run_jobs(
    jobs: Sequence[Job], out: Path, *, slots: int, gpus: Sequence[str], restarts: int = 0
) -> Iterator[None]:
    """Train and measure the runs of all jobs during the block, and wait for their end.

    Args:
        gpus: identifiers of GPUs, which are distributed over the slots.
        restarts: how often a trainer that is lost is started again.
    Raises:
        StudyFailed: names the runs that are not measured, and the reasons.
    """
    runs = list(dict.fromkeys(run for job in jobs for run in job.runs))
    queue, ended_runs = SimpleQueue[Job](), SimpleQueue[str]()
    for job in jobs:
        queue.put(job)
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
                restarts=restarts,
                environment=own_gpu(slot, gpus),
                stop=stop,
                ended=ended_runs,
            )
            for slot in range(slots)
        ]
        yield
        follow(futures, ended_runs, sum(len(job.runs) for job in jobs), out=out)
    finally:
        stop.set()  # also after an interrupt; the flow ends after its trainers
    results = [future.result(raise_on_failure=False) for future in futures]
    check_complete(out, runs, errors=[str(r) for r in results if isinstance(r, Exception)])


def follow(
    futures: Sequence[Any], ended_runs: "SimpleQueue[str]", num_trainings: int, *, out: Path
) -> None:
    """Show how many trainings have ended, until every slot has ended."""
    pending = {future.wrapped_future for future in futures}
    with growing_artifact(artifact_key("study", str(out))) as publish:
        while pending:
            pending = wait(pending, timeout=LOOK_EVERY_S).not_done
            done = ended_runs.qsize()
            publish(done / max(1, num_trainings), f"{done} of {num_trainings} trainings ended")


@task(task_run_name="tables", **RECORD)
def write_tables(settings: StudyConfig, cells: Sequence[Cell], out: Path) -> dict[str, Any]:
    record = write_study(settings, cells, out)
    key = artifact_key("study", str(out))
    markdown_file(out / "study.md", key=key)
    link_to(out / "study.md", key=key)
    return record


def check_complete(out: Path, runs: Sequence[str], *, errors: Sequence[str]) -> None:
    """Raise StudyFailed for the runs that are not measured, whatever the tasks reported.

    Args:
        errors: errors of slots, which say why runs were not begun.
    """
    missing = {
        run: failure_of(out / run) or "; ".join(errors) or "not run"
        for run in runs
        if not is_measured(load_settings(TrainConfig, out / run / CONFIG), out / run)
    }
    if missing:
        raise StudyFailed(failure_message(missing, cells=len(runs), out=out))


# A slot: one training process after another


class SlotLost(RuntimeError):
    """A slot's GPU does not work any more; the same command trains its remaining runs."""


@task(task_run_name="train slot {slot}", **RECORD)
def work(
    slot: int,
    out: Path,
    jobs: "SimpleQueue[Job]",
    *,
    slots: int,
    restarts: int,
    environment: Mapping[str, str],
    stop: threading.Event,
    ended: "SimpleQueue[str]",
) -> dict[str, Any]:
    """Take jobs and train their runs, one process at a time; `stop` ends it early.

    Args:
        environment: changes to this process's environment: the slot's GPU, if it has one.
        ended: queue that receives the run of every training that ended.
    Raises:
        SlotLost: a training failed, and its GPU does not work.
    """
    done: list[str] = []
    for job, run in runs_of_jobs(jobs):
        if stop.is_set():
            break
        failure = train_run(
            *(out / run, job), slots=slots, restarts=restarts, environment=environment, stop=stop
        )
        # On a lost GPU, all remaining runs would fail, one after the other.
        if failure and environment and (fault := gpu_fault(environment, stop)):
            reason = f"slot {slot}: GPU {environment[VISIBLE_DEVICES]} does not work: {fault}"
            log.error("%s; other slots go on", reason)
            record_failure(out / run, replace(failure, reason=f"{reason}; {failure.reason}"))
            raise SlotLost(reason)
        if failure:
            record_failure(out / run, failure)
        done.append(run)
        ended.put(run)
    return {"slot": slot, "runs": done}


def runs_of_jobs(jobs: "SimpleQueue[Job]") -> Iterator[tuple[Job, str]]:
    """The runs of one job after another, until no job is left."""
    with suppress(Empty):
        while True:
            job = jobs.get_nowait()
            yield from ((job, run) for run in job.runs)


@dataclass(frozen=True)
class TrainingFailure:
    """Why a run is not trained, in one line, and the last lines of its trainer."""

    reason: str
    last_lines: Sequence[str] = ()


def record_failure(run: Path, failure: TrainingFailure) -> None:
    """Write the failure to the run's folder, if possible."""
    try:
        note_failure(run, failure.reason, last_lines=failure.last_lines)
    except OSError as error:
        log.warning("%s: the reason of its failure is not recorded: %s", run, error)


def train_run(
    run: Path,
    job: Job,
    *,
    slots: int,
    restarts: int,
    environment: Mapping[str, str],
    stop: threading.Event,
) -> TrainingFailure | None:
    """Train some seeds of a run, in one of the slots that share the machine's cores."""
    name = f"{run.parent.name}/{run.name}"
    try:
        for seed in job.seeds:
            if sibling := copy_first_stage(run, seed=seed):
                log.info("%s seed %d: takes over the first stage of %s", name, seed, sibling.name)
        ended = run_trainer(
            load_settings(TrainConfig, run / CONFIG),
            run,
            Machines(device="cuda" if environment else "auto"),
            on_line=lambda line: log.info("%s: %s", name, line),
            seeds=job.seeds if job.shares_runs else (),
            trainers=slots,
            environment={**QUIET, **environment},
            restarts=restarts,
            stop=stop,
        )
    except Exception as error:  # a damaged file of one run must not end the slot
        log.error("%s: %s", name, error)
        return TrainingFailure(str(error) or type(error).__name__)
    if ended.outcome.returncode == 0 or stop.is_set():
        return None
    log.error("%s: %s", name, ended)
    return TrainingFailure(str(ended), ended.outcome.last_lines)
