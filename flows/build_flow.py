"""The Prefect build flow: plan, generate (one task run per slot), index.

Prefect shows progress, retries and fails; only the store says which shards are done.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import flow, task

from semix.data.formats import PROTOTYPES
from semix.data.lineage import made_and_reused, source
from semix.data.ranges import format_ranges, parse_ranges
from semix.data.root import Root, RootProgress
from semix.data.verify import quarantine_prototypes
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, build_summary, progress_artifact, series_sheet
from semix.flows.build_steps import (
    ALL_SHARDS,
    BuildFailed,
    ShardSelection,
    check_complete,
    check_work,
    index_or_quarantine,
    log_complete,
    log_notes,
    open_or_create,
    quarantine_damage,
    restore_prototypes,
)
from semix.flows.calling import from_caller
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.progress import progress_display
from semix.flows.slots import SlotSettings, check_slots
from semix.flows.slots.running import follow, run_slots
from semix.flows.slots.slot import RECORD
from semix.pipeline.plan import Build
from semix.pipeline.root import running_on

log = logging.getLogger("semix.build")

Listener = Callable[[RootProgress], None]


def run_name(parameters: Mapping[str, Any]) -> str:
    """`build mixed`, `build mixed, shards 3,7-9`."""
    limits = [f"{name} {parameters[name][:80]}" for name in ("shards", "range") if parameters[name]]
    return ", ".join([f"build {base_name(parameters['out'])}", *limits])


@flow(**flow_options("build", run_name))
def build_flow(
    out: p.Out,
    config: p.OptionalConfig = "",
    overrides: p.BuildOverrides = [],  # noqa: B006 - Prefect copies it
    slots: p.Slots = 0,
    runner: p.Runner = "local",
    cluster: p.Cluster = "",
    range: p.Range = "",
    shards: p.Shards = "",
    retry_failed: p.RetryFailed = False,
    skip_failed: p.SkipFailed = "",
    full: p.Full = False,
    device: p.Device = "auto",
) -> dict[str, Any]:
    """Build a mixed dataset, or its missing shards.

    Start it again at any time, with the same parameters or without a config: committed shards
    stay, damaged ones are made again.
    """
    shard_numbers = parse_ranges(shards) if shards else frozenset()
    selection = ShardSelection(shard_numbers, retry_failed, skip_failed)
    with run_context("build"):
        settings = SlotSettings(slots, runner, cluster, range, device)
        checked_build = from_caller(Build)
        build = checked_build or open_or_create(out, config, overrides, device=settings.flow_device)
        root = build.root
        plan(root, selection, full=full)
        if checked_build is None and selection.shards_to_make(root):
            check_slots(settings)
            check_work(build, selection)
        shards_before = root.done()  # without quarantined shards
        for _ in [1, 2]:
            make_missing(build, settings, selection)
            if name := index(root):
                break
        else:
            raise BuildFailed(
                f"shards are damaged again and again; look at: semix verify {root.url}"
            )
        lineage = {**source(root.plan), **made_and_reused(shards_before, root.done())}
        return {"index": name, **root.status(), "lineage": lineage}


@task(task_run_name="plan", **RECORD)
def plan(root: Root, selection: ShardSelection, *, full: bool) -> dict[str, Any]:
    """Quarantine damaged files, and count the missing shards."""
    if full:
        quarantine_damage(root)
    else:
        quarantine_prototypes(root)  # files of shards are compared when they are indexed
    return {"plan": root.plan.digest, "lacking": len(selection.shards_to_make(root))}


def make_missing(build: Build, settings: SlotSettings, selection: ShardSelection) -> None:
    """Make the selected shards that are missing. Raises BuildFailed if some are still missing."""
    missing, errors = selection.shards_to_make(build.root), []
    if missing:
        shards = "" if selection == ALL_SHARDS else format_ranges(missing)
        errors = make_shards(build, settings, shards)
    else:
        restore_prototypes(build.root, build.overrides, settings.flow_device)
        log_complete(build.root, selection)
    check_complete(build.root, selection, errors)


def make_shards(build: Build, settings: SlotSettings, shards: str) -> list[str]:
    """Make shards in slots, and show the result; returns the errors of slots."""
    with start_shards(build, settings, shards) as finish:
        return finish()


@contextmanager
def start_shards(
    build: Build, settings: SlotSettings, shards: str = "", *, listener: Listener = lambda _: None
) -> Iterator[Callable[[], list[str]]]:
    """Run slots during the block; yields a function that waits for their end, as `make_shards`.

    Raises:
        InputError: committed shards were made with other prototypes.
    """
    root = build.root
    key = artifact_key("build", root.url, root.plan.digest)
    before, shards_before, start = root.progress(), root.done(), time.monotonic()
    log_notes(build.config)
    if root.store.exists(PROTOTYPES):
        root.check_prototypes(root.store.get(PROTOTYPES))
    with (
        running_on(root),
        run_slots(root.url, settings, shards=shards, overrides=build.overrides) as futures,
    ):

        def finish() -> list[str]:
            with progress_display("generate") as show, progress_artifact(key) as publish:
                errors = follow(futures, root, listeners=(listener, show, publish))
            seconds = time.monotonic() - start
            build_summary(root, key=key, began=before, before=shards_before, seconds=seconds)
            series_sheet(root, key=key)
            return errors

        yield finish


@task(task_run_name="index", **RECORD)
def index(root: Root) -> str | None:
    """Write the index, or quarantine damaged shards and return None."""
    return index_or_quarantine(root)
