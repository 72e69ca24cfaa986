"""The Prefect build flow: plan, prototypes, generate (one task run a slot), index.

Prefect shows, starts again and gives up; which shard is done is read from the store alone.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.futures import PrefectConcurrentFuture
from prefect.task_runners import ThreadPoolTaskRunner

from data.label_sets import LabelSet
from data.progress import Progress
from data.ranges import parse_ranges
from data.repair import refuse_other_prototypes
from data.root import Root
from flows.build import BuildFailed, failure_message, say_left_out
from flows.gpus import visible_gpus
from flows.progress import shown
from flows.selection import gaps, lacking_shards
from flows.slot import RECORD, generate, worker_command
from pipeline.fidelity import ensure_fidelity
from pipeline.prototypes import ensure_prototypes
from pipeline.root import plan_of

ARTIFACT_EVERY_S = 5.0
LOOK_EVERY_S = 1.0

SlotFuture = PrefectConcurrentFuture[dict[str, Any]]

log = logging.getLogger("semix.build")


@task(task_run_name="plan", **RECORD)
def plan(url: str, shards: str) -> dict[str, Any]:
    root = Root(url)
    lacking = lacking_shards(root, parse_ranges(shards) if shards else ())
    return {"digest": root.plan["digest"], "lacking": len(lacking)}


@task(task_run_name="prototypes", **RECORD)
def prototypes(url: str) -> None:
    """Measured again if they were put aside; they must then be those that shards carry."""
    ensure_prototypes(Root(url))
    refuse_other_prototypes(Root(url))


@task(task_run_name="fidelity", **RECORD)
def fidelity(url: str) -> None:
    log.info("comparing approximate images with exact ones before any shard is made")
    ensure_fidelity(Root(url))


@task(task_run_name="index", **RECORD)
def index(url: str) -> str:
    return Root(url).write_index()


def run_build(root: Root, slots: int, *, shards: str = "", allowed: int | None = None) -> None:
    """Run the flow under a name that a person recognises; see `build_flow`."""
    name = f"{Path(root.url).name}, {len(root.missing())} of {root.plan['num_shards']} shards"
    runner: Any = ThreadPoolTaskRunner(max_workers=slots)
    build_flow.with_options(flow_run_name=name, task_runner=runner)(
        root.url, slots, shards, allowed
    )


@flow(name="semix build", persist_result=False, result_serializer="json")
def build_flow(url: str, slots: int, shards: str = "", allowed: int | None = None) -> str:
    """Make the shards that the store lacks.

    Args:
        shards: only these, as in `3,7-9`; empty for all.
        allowed: end well if at most so many shards of the root failed; None if all are wanted.
    Raises:
        BuildFailed: a wanted shard is missing.
    """
    root = Root(url)
    plan(url, shards)
    prototypes(url)
    if plan_of(root).config.generator.approximate.active:
        fidelity(url)
    stop = threading.Event()
    try:
        futures = start_workers(url, slots, shards=shards, stop=stop)
        with shown("generate") as show, progress_artifact() as publish:
            follow(futures, root, listeners=(show, publish))
    finally:
        stop.set()  # an interrupt passes here; the flow ends when its workers have
    refuse_gaps(root, futures, shards=shards, allowed=allowed)
    return index(url)


def start_workers(
    url: str, slots: int, *, shards: str = "", labels: str = "", stop: threading.Event
) -> list[SlotFuture]:
    """One task run a slot; its worker makes images, or the labels of one set."""
    what = "label" if labels else "generate"
    work = generate.with_options(task_run_name=f"{what} slot {{slot}}")
    gpus = visible_gpus()
    # Together no more threads than cores: a few too many cost ten times, not a few per cent.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // slots))
    quiet = {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": threads}  # no bars as lines in a log
    futures: list[Any] = [
        work.submit(
            slot,
            worker_command(url, slot, slots, shards=shards, labels=labels),
            environment=quiet | ({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}),
            stop=stop,
        )
        for slot in range(slots)
    ]
    return futures


def follow(
    futures: Sequence[SlotFuture],
    root: Root | LabelSet,
    *,
    listeners: Sequence[Callable[[Progress], None]],
) -> None:
    """Count commit records until every task is done, and tell the listeners."""
    pending, pause = {future.wrapped_future for future in futures}, 0.0
    while pending:
        pending = wait(pending, timeout=pause).not_done
        started = time.monotonic()
        progress = root.progress()
        # On a large root or a slow store, looking must not become the work.
        pause = max(LOOK_EVERY_S, 20 * (time.monotonic() - started))
        for listener in listeners:
            listener(progress)


@contextmanager
def progress_artifact(*, key: str = "semix-build") -> Iterator[Callable[[Progress], None]]:
    """One Prefect artifact for the run; yields a function that updates it now and then."""
    artifact: Any = create_progress_artifact(0.0, key=key, description="shards")
    latest, due = None, 0.0

    def publish(progress: Progress) -> None:
        nonlocal latest, due
        latest = progress
        if time.monotonic() >= due:
            due = time.monotonic() + ARTIFACT_EVERY_S
            _send(artifact, progress)

    yield publish
    if latest is not None:
        _send(artifact, latest)


def _send(artifact: Any, progress: Progress) -> None:
    text = f"{progress.done} of {progress.shards} shards, {progress.failed} failed"
    try:
        update_progress_artifact(artifact, 100 * progress.done / progress.shards, text)
    except Exception as error:  # the picture in Prefect is not worth the run
        log.warning("Prefect took no progress: %s", error)


def refuse_gaps(
    root: Root, futures: Sequence[SlotFuture], *, shards: str, allowed: int | None
) -> None:
    """Raises BuildFailed if the store lacks a wanted shard, whatever the tasks say."""
    lacking, left_out = gaps(root, parse_ranges(shards) if shards else (), allowed=allowed)
    if not lacking:
        say_left_out(root, left_out)
        return
    results = [future.result(raise_on_failure=False) for future in futures]
    errors = [str(result) for result in results if isinstance(result, Exception)]
    raise BuildFailed(failure_message(root, lacking, errors))
