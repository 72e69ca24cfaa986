"""The Prefect quickstart flow: small models, builds, trainings, and the report on them."""

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
from semix.data.contact_sheet import contact_sheet, read_series, some_of_all_pairs
from semix.data.machine import usable_cores
from semix.data.root import Root, RootProgress
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, link_to, result_table
from semix.flows.build_flow import index, making, plan
from semix.flows.build_steps import ALL, refuse_gaps
from semix.flows.flow_runs import flow_options, name_of, running
from semix.flows.gpus import visible_gpus
from semix.flows.paths import training_folder
from semix.flows.progress import Steps
from semix.flows.quickstart import (
    CHOSEN,
    LOG,
    METHODS,
    NOISE,
    PICTURE,
    RANDOM,
    REPORT,
    SECONDS,
    Clock,
    begun_roots,
    cells_of_story,
    make_models,
    refuse_other_data,
)
from semix.flows.slots import SlotSettings, workers_ahead
from semix.flows.slots.slot import RECORD
from semix.flows.study_flow import trainings
from semix.flows.terminal import details_in
from semix.pipeline.standins import StandIns
from semix.pipeline.standins.recipe import Report

MOST_TRAINERS, MOST_BUILDERS = 8, 4  # trainers, and builders of each mixed dataset, at a time
ALONE_FROM = 0.6  # of the generator's training, when what was beside it has ended on two cores
MODELS, TRAININGS, PAGE = "small models", "trainings", "report"
IMAGES = {name: f"mixed images, {noise}" for name, (noise, _) in NOISE.items()}
# Seconds on two cores, of three seeds; plain cross-entropy needs no mixed image, so it is trained
# while the models are.
EXPECTED = {MODELS: 75.0, IMAGES[RANDOM]: 35.0, IMAGES[CHOSEN]: 25.0, TRAININGS: 65.0, PAGE: 5.0}
RUNNER: Any = ThreadPoolTaskRunner(max_workers=2 * MOST_TRAINERS)


def run_name(given: Mapping[str, Any]) -> str:
    """`quickstart into digits, 5 seeds`."""
    return f"quickstart into {name_of(given['out'])}, {given['seeds']} seeds"


@flow(**flow_options("quickstart", run_name), task_runner=RUNNER)
def quickstart_flow(out: p.StoryFolder, seeds: p.Seeds = 3) -> dict[str, Any]:
    """Tell the whole story on the bundled digits: small models, two builds, methods, a report.

    Start it again at any time: what is there and unchanged is kept.
    """
    # Networks this small gain nothing from a second thread and lose much where a core is busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with running("quickstart"):
        place, gpus = training_folder(out), visible_gpus()
        steps = Steps({**EXPECTED, TRAININGS: EXPECTED[TRAININGS] * seeds / 3})
        clock = Clock(place / SECONDS)
        cells = cells_of_story(place, seeds)
        alone = [cell for cell in cells if METHODS[cell.method] is None]
        with details_in(place / LOG), steps.shown():
            steps.say(f"details: {place / LOG}")
            with builders_ahead() as report_training:
                with trained(alone, place, gpus, spare=1), steps.step(MODELS):
                    models = small_models(place, clock, report_training)
                roots = images_and_trainings(models, cells, place, gpus, clock=clock, steps=steps)
            for cell in cells:
                if (mixed := METHODS[cell.method]) is not None:
                    refuse_other_data(cell.run(place), roots[mixed])
            with steps.step(PAGE):
                page = report(place / REPORT, roots, [cell.run(place) for cell in cells], clock)
        return {"report": str(page), "runs": [str(cell.run(place)) for cell in cells]}


@task(task_run_name="small models", **RECORD)
def small_models(out: Path, clock: Clock, report_training: Report) -> StandIns:
    return make_models(out, clock, report_training)


def builder_slots() -> SlotSettings:
    """Of each mixed dataset, since they are made side by side."""
    return SlotSettings(max(1, min(MOST_BUILDERS, usable_cores() // len(NOISE))))


@contextmanager
def builders_ahead() -> Iterator[Report]:
    """Told how far the generator's training is, starts the builders when cores begin to idle."""
    with ExitStack() as stack:
        started = False

        def report(stage: str, done: int, total: int) -> None:
            nonlocal started
            if stage == "denoiser" and done > ALONE_FROM * total and not started:
                started = True
                ahead = workers_ahead(builder_slots(), builds=len(NOISE))
                stack.enter_context(ahead)

        yield report


def images_and_trainings(
    models: StandIns,
    cells: Sequence[Cell],
    out: Path,
    gpus: Sequence[str],
    *,
    clock: Clock,
    steps: Steps,
) -> dict[str, Root]:
    """Both mixed datasets, made side by side, and the trainings on each as soon as it is there.

    Mixed datasets that are there, and trainings that are measured, are kept.
    """
    roots = begun_roots(models, out)
    settings = builder_slots()
    with ExitStack() as stack:
        ends = {}
        for name, root in roots.items():
            plan(root, ALL, full=False)
            if root.missing():
                draw = drawing(root, out / PICTURE, steps)
                ends[name] = stack.enter_context(making(root, settings, listener=draw))
        for name, root in roots.items():
            with steps.step(IMAGES[name]):
                if name in ends:
                    with clock.step(IMAGES[name]):
                        refuse_gaps(root, ALL, ends[name]())
                index(root)
            on_it = [cell for cell in cells if METHODS[cell.method] == name]
            stack.enter_context(trained(on_it, out, gpus))
        first_picture(roots[RANDOM], out / PICTURE)  # of all pairs, now that they are there
        todo = not all(is_measured(cell.config, cell.run(out)) for cell in cells)
        with steps.step(TRAININGS), clock.step(TRAININGS) if todo else nullcontext():
            stack.close()
    return roots


def drawing(root: Root, path: Path, steps: Steps) -> Callable[[RootProgress], None]:
    """Draws the first series that are committed, and says where."""

    def draw(progress: RootProgress) -> None:
        if progress.done and not path.exists() and first_picture(root, path):
            steps.say(f"first images: {path}")

    return draw


@contextmanager
def trained(
    cells: Sequence[Cell], out: Path, gpus: Sequence[str], *, spare: int = 0
) -> Iterator[None]:
    """Train and measure what is not measured, beside what the block does on `spare` cores."""
    todo = [cell for cell in cells if not is_measured(cell.config, cell.run(out))]
    for cell in todo:
        claim_run(cell.config, cell.run(out))
    if not todo:
        yield
        return
    slots = min(MOST_TRAINERS, len(gpus) or max(1, usable_cores() - spare))
    with trainings(plan_jobs(todo, slots=slots), out, slots=slots, gpus=gpus):
        yield


@task(task_run_name="report", **RECORD)
def report(page: Path, roots: Mapping[str, Root], runs: Sequence[Path], clock: Clock) -> Path:
    from semix.flows.quickstart_report import (
        make_report,  # torch reads how many threads it may use once
    )

    make_report(page, roots=roots, runs=runs, clock=clock)
    key = artifact_key("quickstart", str(page.parent))
    result_table(load_methods(runs), key=key)
    link_to(page, key=key)
    return page


def first_picture(root: Root, path: Path) -> bool:
    """Draw some series of what is committed, if anything is; whether there is a picture."""
    if not root.done():
        return False
    contact_sheet(read_series(root, some_of_all_pairs(root))).save(path)
    return True
