"""The Prefect build flow: plan, generate (one task run per slot), index.

Prefect shows progress, retries and gives up; only the store says which shards are done.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import flow, task
from semix.data.lineage import made_and_reused, source
from semix.data.ranges import format_ranges, parse_ranges
from semix.data.root import Root, RootProgress
from semix.data.verify import check_same_origin
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, build_summary, progress_artifact, series_sheet
from semix.flows.build_steps import (
    ALL_SHARDS,
    ShardSelection,
    check_complete,
    check_work,
    log_complete,
    log_notes,
    open_or_create,
    quarantine_damage,
    restore_prototypes,
)
from semix.flows.calling import from_caller
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.progress import progress_display
from semix.flows.slots import SlotSettings
from semix.flows.slots.running import follow, slots_running
from semix.flows.slots.slot import RECORD
from semix.pipeline.root import config_of, running_on

log = logging.getLogger("semix.build")

Listener = Callable[[RootProgress], None]


def run_name(parameters: Mapping[str, Any]) -> str:
    """`build mixed`, `build mixed, shards 3,7-9`."""
    parts = [f"{what} {parameters[what][:80]}" for what in ("shards", "range") if parameters[what]]
    return ", ".join([f"build {base_name(parameters['out'])}", *parts])


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
    chosen = parse_ranges(shards) if shards else frozenset()
    selection = ShardSelection(chosen, retry_failed, skip_failed)
    with run_context("build"):
        checked = from_caller(Root)
        root = checked or open_or_create(out, config, overrides)
        plan(root, selection, full=full)
        before = root.done()  # without quarantined shards
        missing, errors = selection.shards_to_make(root), []
        settings = SlotSettings(slots, runner, cluster, range, device)
        if missing:
            if checked is None:
                check_work(root, settings, selection)
            errors = make(root, settings, "" if selection == ALL_SHARDS else format_ranges(missing))
        else:
            restore_prototypes(root, settings.flow_device)
            log_complete(root, selection)
        check_complete(root, selection, errors)
        lineage = {**source(root.plan), **made_and_reused(before, root.done())}
        return {"index": index(root), **root.status(), "lineage": lineage}


@task(task_run_name="plan", **RECORD)
def plan(root: Root, selection: ShardSelection, *, full: bool) -> dict[str, Any]:
    """Quarantine damaged parts, and count the missing shards."""
    quarantine_damage(root, full=full)
    return {"plan": root.plan.digest, "lacking": len(selection.shards_to_make(root))}


def check_before_shards(root: Root) -> None:
    """Raise InputError for other images or models than committed shards were made from."""
    log_notes(config_of(root))
    for kind, ours in root.input_digests().items():
        check_same_origin(root, kind, ours)


def make(root: Root, settings: SlotSettings, shards: str) -> list[str]:
    """Make shards in slots, and show the result; returns the errors of slots."""
    with making(root, settings, shards) as end:
        return end()


@contextmanager
def making(
    root: Root, settings: SlotSettings, shards: str = "", *, listener: Listener = lambda _: None
) -> Iterator[Callable[[], list[str]]]:
    """Run slots during the block; yields a function that waits for their end, as `make` does."""
    key = artifact_key("build", root.url, root.plan.digest)
    began, before, start = root.progress(), root.done(), time.monotonic()
    check_before_shards(root)
    with (
        running_on(root),
        slots_running(root.url, settings, shards=shards, overrides=root.overrides) as futures,
    ):

        def end() -> list[str]:
            with progress_display("generate") as show, progress_artifact(key) as publish:
                errors = follow(futures, root, listeners=(listener, show, publish))
            took = time.monotonic() - start
            build_summary(root, key=key, began=began, before=before, seconds=took)
            series_sheet(root, key=key)
            return errors

        yield end


@task(task_run_name="index", **RECORD)
def index(root: Root) -> str:
    return root.write_index()
