"""The Prefect loop flow: build, train, add series where classes are confused, train again."""

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from semix.calib.results import load_methods
from semix.calib.run_folder import claim_run, is_measured
from semix.calib.study_jobs import plan_jobs
from semix.data.files import published
from semix.data.real import load_real
from semix.data.root import Root
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, link_to, result_table
from semix.flows.build_flow import build_flow
from semix.flows.calling import from_caller
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.gpus import visible_gpus
from semix.flows.loop import (
    CHOSEN,
    EVEN,
    PAGE,
    LoopRun,
    PreparedLoop,
    Replicate,
    prepare_loop,
    run_folder,
)
from semix.flows.loop_config import LoopConfig
from semix.flows.paths import training_folder
from semix.flows.series_by_run import share_by_run
from semix.flows.slots import MAX_SLOTS
from semix.flows.slots.slot import RECORD
from semix.flows.study_builds import MODELS, model_settings
from semix.flows.study_flow import run_jobs
from semix.pipeline.root import create_build, extend_root, extend_root_by_run
from semix.pipeline.standins import train_standins

RUNNER: Any = ThreadPoolTaskRunner(max_workers=MAX_SLOTS)


def run_name(parameters: Mapping[str, Any]) -> str:
    """`loop into birds, 3 rounds`."""
    return f"loop into {base_name(parameters['out'])}, {parameters['rounds']} rounds"


@flow(**flow_options("loop", run_name), task_runner=RUNNER)
def loop_flow(
    config: p.Config,
    out: p.LoopFolder,
    rounds: p.Rounds = 2,
    overrides: p.LoopOverrides = [],  # noqa: B006 - Prefect copies it
    slots: p.Slots = 0,
) -> dict[str, Any]:
    """Build, train, add series where the classifiers confuse classes, and train again.

    Start it again at any time: what is built and measured stays, and what was interrupted goes on.
    """
    with run_context("loop"):
        folder = training_folder(out)
        prepared = from_caller(PreparedLoop) or prepare_loop(
            config, folder, overrides, rounds=rounds, slots=slots
        )
        for replicate in prepared.replicates:
            run_rounds(replicate, models=folder / MODELS, slots=slots)
        written = write_tables(prepared, folder)
        return {"loop": str(written), "replicates": [str(each.out) for each in prepared.replicates]}


def run_rounds(replicate: Replicate, *, models: Path, slots: int) -> None:
    """Build, train and extend one replicate, and write its page."""
    settings, out, runs = replicate.settings, replicate.out, replicate.runs
    begin(settings, out, models=models, slots=slots)
    for number in range(runs[-1].round + 1):
        if number:
            add_series(settings, number, out)
            for kind in (CHOSEN, EVEN):
                build_flow(out=str(out / kind), slots=slots)
        train([run for run in runs if run.round == number], out, slots=slots)
    write_page(settings, runs, out)


def begin(settings: LoopConfig, out: Path, *, models: Path, slots: int) -> None:
    """Build the series of round 0, once; the other mixed dataset begins as a copy."""
    paths = small_models(settings, models) if settings.standins else None
    root = create_build(settings.build_config(paths), str(out / CHOSEN)).root
    if not root.extensions:
        build_flow(out=root.url, slots=slots)
    if not (out / EVEN).exists():
        with published(out / EVEN) as partial_folder:
            shutil.copytree(out / CHOSEN, partial_folder)


@task(task_run_name="small models", **RECORD)
def small_models(settings: LoopConfig, folder: Path) -> dict[str, str]:
    """Settings of small models of the training images, trained unless they exist."""
    return model_settings(train_standins(load_real(settings.real), folder))


@task(task_run_name="add series, round {number}", **RECORD)
def add_series(settings: LoopConfig, number: int, out: Path) -> None:
    """Plan the series of a round in both mixed datasets, unless they are planned."""
    chosen, even = Root(str(out / CHOSEN)), Root(str(out / EVEN))
    planned, pairs = chosen.stored_plan.groups_per_pair, chosen.stored_plan.num_pairs
    if len(chosen.extensions) < number:
        series = settings.series_per_pair * pairs
        judge = run_folder(settings, out, number - 1, CHOSEN)
        names = chosen.plan.class_names
        share = partial(share_by_run, by=settings.by, even=settings.even, class_names=names)
        extend_root_by_run(chosen, series, partial(share, judge, series))
    if len(even.extensions) < number:
        extend_root(even, planned + number * settings.series_per_pair)


def train(runs: Sequence[LoopRun], out: Path, *, slots: int) -> None:
    """Train and measure the runs of a round that are not measured."""
    cells = [run.cell for run in runs if not is_measured(run.config, run.folder)]
    for cell in cells:
        claim_run(cell.config, cell.run(out))
    if cells:
        gpus = visible_gpus()
        count = slots or max(1, len(gpus))
        with run_jobs(plan_jobs(cells, slots=count), out, slots=count, gpus=gpus):
            pass


@task(task_run_name="page", **RECORD)
def write_page(settings: LoopConfig, runs: Sequence[LoopRun], out: Path) -> None:
    from semix.flows.loop_page import write_loop_page  # torch and matplotlib cost seconds

    write_loop_page(settings, runs, out)
    key = artifact_key("loop", str(out))
    result_table(load_methods([run.folder for run in runs]), key=key)
    link_to(out / PAGE, key=key)


@task(task_run_name="tables", **RECORD)
def write_tables(prepared: PreparedLoop, out: Path) -> Path:
    from semix.flows.loop_tables import write_loop_tables

    return write_loop_tables(prepared, out)
