"""The Prefect build flow: plan, prototypes, generate (one task run a slot), index.

Prefect shows, starts again and gives up; which shard is done is read from the store alone.
"""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from data.ranges import parse_ranges
from data.repair import refuse_other_prototypes
from data.root import Root
from flows.artifacts import progress_artifact
from flows.build import BuildFailed, failure_message, say_left_out
from flows.progress import shown
from flows.selection import gaps, lacking_shards
from flows.slot import RECORD
from flows.slots import SlotFuture, follow, start_workers
from pipeline.fidelity import ensure_fidelity
from pipeline.prototypes import ensure_prototypes
from pipeline.root import plan_of

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
