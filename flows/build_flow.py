"""The Prefect build flow: plan, generate (one task run per slot), index.

Prefect shows progress, retries and fails; only the store says which shards are done.
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
from semix.flows.slots.running import follow, run_slots
from semix.flows.slots.slot import RECORD
from semix.pipeline.root import config_of, running_on

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
        checked_root = from_caller(Root)
        root = checked_root or open_or_create(out, config, overrides)
        plan(root, selection, full=full)
        shards_before = root.done()  # without quarantined shards
        missing, errors = selection.shards_to_make(root), []
        settings = SlotSettings(slots, runner, cluster, range, device)
        if missing:
            if checked_root is None:
                check_work(root, settings, selection)
            errors = make_shards(
                root, settings, "" if selection == ALL_SHARDS else format_ranges(missing)
            )
        else:
            restore_prototypes(root, settings.flow_device)
            log_complete(root, selection)
        check_complete(root, selection, errors)
        lineage = {**source(root.plan), **made_and_reused(shards_before, root.done())}
        return {"index": index(root), **root.status(), "lineage": lineage}


@task(task_run_name="plan", **RECORD)
def plan(root: Root, selection: ShardSelection, *, full: bool) -> dict[str, Any]:
    """Quarantine damaged files, and count the missing shards."""
    quarantine_damage(root, full=full)
    return {"plan": root.plan.digest, "lacking": len(selection.shards_to_make(root))}


def check_before_shards(root: Root) -> None:
    """Raise InputError if committed shards were made from other images or models."""
    log_notes(config_of(root))
    for file, origin in root.input_digests().items():
        check_same_origin(root, file, origin)


def make_shards(root: Root, settings: SlotSettings, shards: str) -> list[str]:
    """Make shards in slots, and show the result; returns the errors of slots."""
    with start_shards(root, settings, shards) as finish:
        return finish()


@contextmanager
def start_shards(
    root: Root, settings: SlotSettings, shards: str = "", *, listener: Listener = lambda _: None
) -> Iterator[Callable[[], list[str]]]:
    """Run slots during the block; yields a function that waits for their end, as `make_shards`."""
    key = artifact_key("build", root.url, root.plan.digest)
    before, shards_before, start = root.progress(), root.done(), time.monotonic()
    check_before_shards(root)
    with (
        running_on(root),
        run_slots(root.url, settings, shards=shards, overrides=root.overrides) as futures,
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
def index(root: Root) -> str:
    return root.write_index()
