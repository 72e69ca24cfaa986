"""The Prefect quickstart flow: small models, builds, trainings, and the report on them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, task

from data.root import Root
from flows import parameters as p
from flows.artifacts import artifact_key, link_to, result_table
from flows.flow_runs import flow_options, name_of, running
from flows.gpus import visible_gpus
from flows.places import training_folder
from flows.quickstart import (
    METHODS,
    NOISE,
    SECONDS,
    Clock,
    make_mixed,
    make_models,
    make_report,
    train_method,
)
from flows.slots.slot import RECORD
from pipeline.standins import StandIns


def run_name(given: Mapping[str, Any]) -> str:
    """`quickstart into digits, 5 seeds`."""
    return f"quickstart into {name_of(given['out'])}, {given['seeds']} seeds"


@flow(**flow_options("quickstart", run_name))
def quickstart_flow(out: p.StoryFolder = "quickstart", seeds: p.Seeds = 5) -> dict[str, Any]:
    """Tell the whole story on the bundled digits: small models, two builds, methods, a report.

    Start it again at any time: what is there and unchanged is kept.
    """
    # Networks this small gain nothing from a second thread and lose much where a core is busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with running("quickstart"):
        place = training_folder(out)
        visible_gpus()  # or why that cannot be known, before models are trained
        clock = Clock(place / SECONDS)
        models = small_models(place, clock)
        roots = {name: make_mixed(models, place / name, clock) for name in NOISE}
        runs = [
            train_method(name, roots[mixed] if mixed else None, place / "runs" / name, seeds, clock)
            for name, mixed in METHODS.items()
        ]
        page = report(place / "report.html", roots, runs, clock)
        return {"report": str(page), "runs": [str(run) for run in runs]}


@task(task_run_name="small models", **RECORD)
def small_models(out: Path, clock: Clock) -> StandIns:
    return make_models(out, clock)


@task(task_run_name="report", **RECORD)
def report(page: Path, roots: Mapping[str, Root], runs: Sequence[Path], clock: Clock) -> Path:
    make_report(page, roots=roots, runs=runs, clock=clock)
    key = artifact_key("quickstart", str(page.parent))
    result_table(runs, key=key)
    link_to(page, key=key)
    return page
