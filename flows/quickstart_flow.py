"""The Prefect quickstart flow: small models, builds, training runs, and a report."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from semix.calib.results import load_methods
from semix.calib.run_folder import claim_run, is_measured
from semix.calib.study import Cell
from semix.calib.study_jobs import plan_jobs
from semix.data.contact_sheet import contact_sheet, read_series, sample_series
from semix.data.machine import usable_cores
from semix.data.root import Root, RootProgress
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, link_to, result_table
from semix.flows.build_flow import index, plan, start_shards
from semix.flows.build_steps import ALL_SHARDS, BuildFailed, check_complete
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.gpus import visible_gpus
from semix.flows.paths import training_folder
from semix.flows.progress import Steps
from semix.flows.quickstart import (
    LOG,
    METHODS,
    NOISE,
    PICTURE,
    RANDOM,
    REPORT,
    SECONDS,
    SELECTED,
    Clock,
    check_same_data,
    make_models,
    open_builds,
    quickstart_cells,
)
from semix.flows.slots import SlotSettings, prepare_workers
from semix.flows.slots.slot import RECORD
from semix.flows.study_flow import run_jobs
from semix.flows.terminal import details_in
from semix.pipeline.standins import StandIns
from semix.pipeline.standins.recipe import Report

MAX_TRAINERS, MAX_BUILDERS = 8, 4  # at a time: trainers, and builders per mixed dataset
# Fraction of the generator's training after which, on two cores, no other training runs beside it.
ALONE_FROM = 0.6
MODELS, TRAININGS, PAGE = "small models", "trainings", "report"
IMAGES = {name: f"mixed images, {noise}" for name, (noise, _) in NOISE.items()}
# Seconds on two cores, with three seeds; cross-entropy needs no mixed images, so it is trained at
# the same time as the models.
EXPECTED = {MODELS: 75.0, IMAGES[RANDOM]: 35.0, IMAGES[SELECTED]: 25.0, TRAININGS: 65.0, PAGE: 5.0}
RUNNER: Any = ThreadPoolTaskRunner(max_workers=2 * MAX_TRAINERS)


def run_name(parameters: Mapping[str, Any]) -> str:
    """`quickstart into digits, 5 seeds`."""
    return f"quickstart into {base_name(parameters['out'])}, {parameters['seeds']} seeds"


@flow(**flow_options("quickstart", run_name), task_runner=RUNNER)
def quickstart_flow(out: p.QuickstartFolder, seeds: p.Seeds = 3) -> dict[str, Any]:
    """Run everything once on the bundled digits: small models, two builds, training, a report.

    Start it again at any time: finished steps are not run again.
    """
    # Networks this small gain nothing from a second thread and lose much if a core is busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with run_context("quickstart"):
        folder, gpus = training_folder(out), visible_gpus()
        steps = Steps({**EXPECTED, TRAININGS: EXPECTED[TRAININGS] * seeds / 3})
        clock = Clock(folder / SECONDS)
        cells = quickstart_cells(folder, seeds)
        unmixed_cells = [cell for cell in cells if METHODS[cell.method] is None]
        with details_in(folder / LOG), steps.displayed():
            steps.say(f"details: {folder / LOG}")
            with prepare_builders() as report_training:
                with train_beside(unmixed_cells, folder, gpus, spare_cores=1), steps.step(MODELS):
                    models = small_models(folder, clock, report_training)
                roots = build_and_train(models, cells, folder, gpus, clock=clock, steps=steps)
            for cell in cells:
                if (mixed := METHODS[cell.method]) is not None:
                    check_same_data(cell.run(folder), roots[mixed])
            with steps.step(PAGE):
                page = report(folder / REPORT, roots, [cell.run(folder) for cell in cells], clock)
        return {"report": str(page), "runs": [str(cell.run(folder)) for cell in cells]}


@task(task_run_name="small models", **RECORD)
def small_models(out: Path, clock: Clock, report_training: Report) -> StandIns:
    return make_models(out, clock, report_training)


def builder_slots() -> SlotSettings:
    """The slots of one mixed dataset; both are built at the same time."""
    return SlotSettings(max(1, min(MAX_BUILDERS, usable_cores() // len(NOISE))))


@contextmanager
def prepare_builders() -> Iterator[Report]:
    """Yields a report of training progress, which starts the builders once a core is idle."""
    with ExitStack() as stack:
        started = False

        def report(stage: str, done: int, total: int) -> None:
            nonlocal started
            if stage == "denoiser" and done > ALONE_FROM * total and not started:
                started = True
                workers = prepare_workers(builder_slots(), builds=len(NOISE))
                stack.enter_context(workers)

        yield report


def build_and_train(
    models: StandIns,
    cells: Sequence[Cell],
    out: Path,
    gpus: Sequence[str],
    *,
    clock: Clock,
    steps: Steps,
) -> dict[str, Root]:
    """Build both mixed datasets at the same time, and train on each as soon as it is complete.

    Complete datasets and measured runs are not made again.
    """
    builds = open_builds(models, out)
    roots = {name: build.root for name, build in builds.items()}
    settings = builder_slots()
    with ExitStack() as stack:
        finish = {}
        for name, root in roots.items():
            plan(root, ALL_SHARDS, full=False)
            if root.missing():
                draw = first_picture_listener(root, out / PICTURE, steps)
                finish[name] = stack.enter_context(
                    start_shards(builds[name], settings, listener=draw)
                )
        for name, root in roots.items():
            with steps.step(IMAGES[name]):
                if name in finish:
                    with clock.step(IMAGES[name]):
                        check_complete(root, ALL_SHARDS, finish[name]())
                if index(root) is None:
                    raise BuildFailed(f"{root.url}: damaged shards were moved away; run it again")
            dataset_cells = [cell for cell in cells if METHODS[cell.method] == name]
            stack.enter_context(train_beside(dataset_cells, out, gpus))
        first_picture(roots[RANDOM], out / PICTURE)  # drawn again, now with all pairs
        unmeasured = not all(is_measured(cell.config, cell.run(out)) for cell in cells)
        with steps.step(TRAININGS), clock.step(TRAININGS) if unmeasured else nullcontext():
            stack.close()
    return roots


def first_picture_listener(root: Root, path: Path, steps: Steps) -> Callable[[RootProgress], None]:
    """A listener that draws the first committed series, and prints the path."""

    def draw(progress: RootProgress) -> None:
        if progress.done and not path.exists() and first_picture(root, path):
            steps.say(f"first images: {path}")

    return draw


@contextmanager
def train_beside(
    cells: Sequence[Cell], out: Path, gpus: Sequence[str], *, spare_cores: int = 0
) -> Iterator[None]:
    """Train and measure the unmeasured runs during the block, which itself needs `spare_cores`."""
    todo = [cell for cell in cells if not is_measured(cell.config, cell.run(out))]
    for cell in todo:
        claim_run(cell.config, cell.run(out))
    if not todo:
        yield
        return
    slots = min(MAX_TRAINERS, len(gpus) or max(1, usable_cores() - spare_cores))
    with run_jobs(plan_jobs(todo, slots=slots), out, slots=slots, gpus=gpus):
        yield


@task(task_run_name="report", **RECORD)
def report(page: Path, roots: Mapping[str, Root], runs: Sequence[Path], clock: Clock) -> Path:
    from semix.flows.quickstart_report import (
        make_report,  # after OMP_NUM_THREADS is set, which torch reads once
    )

    make_report(page, roots=roots, runs=runs, clock=clock)
    key = artifact_key("quickstart", str(page.parent))
    result_table(load_methods(runs), key=key)
    link_to(page, key=key)
    return page


def first_picture(root: Root, path: Path) -> bool:
    """Draw some committed series; False if there are none."""
    if not root.done():
        return False
    contact_sheet(read_series(root, sample_series(root))).save(path)
    return True
