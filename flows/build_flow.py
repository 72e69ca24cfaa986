"""The Prefect build flow: plan, generate (one task run a slot), index.

Prefect shows, starts again and gives up; which shard is done is read from the store alone.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import flow, task
from semix.data.lineage import made_now, source
from semix.data.ranges import format_ranges, parse_ranges
from semix.data.root import Root, RootProgress
from semix.data.verify import refuse_others
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, build_summary, progress_artifact, series_sheet
from semix.flows.build_steps import (
    ALL,
    Selection,
    check_work,
    opened,
    put_damage_aside,
    refuse_gaps,
    restore,
    say_complete,
    say_notes,
)
from semix.flows.calling import handed
from semix.flows.flow_runs import flow_options, name_of, running
from semix.flows.progress import shown
from semix.flows.slots import SlotSettings
from semix.flows.slots.running import follow, slots_running
from semix.flows.slots.slot import RECORD
from semix.pipeline.root import config_of, running_on

log = logging.getLogger("semix.build")

Listener = Callable[[RootProgress], None]


def run_name(given: Mapping[str, Any]) -> str:
    """`build mixed`, `build mixed, shards 3,7-9`."""
    parts = [f"{what} {given[what][:80]}" for what in ("shards", "range") if given[what]]
    return ", ".join([f"build {name_of(given['out'])}", *parts])


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
    """Make a mixed dataset, or what is missing of it.

    Start it again at any time, with the same parameters or without a config: what is in the store
    is kept, what is damaged is made again.
    """
    chosen = parse_ranges(shards) if shards else frozenset()
    selection = Selection(chosen, retry_failed, skip_failed)
    with running("build"):
        checked = handed(Root)
        root = checked or opened(out, config, overrides)
        plan(root, selection, full=full)
        before = root.done()  # without the damage that was put aside
        lacking, errors = selection.wanted(root), []
        settings = SlotSettings(slots, runner, cluster, range, device)
        if lacking:
            if checked is None:
                check_work(root, settings, selection)
            errors = make(root, settings, "" if selection == ALL else format_ranges(lacking))
        else:
            restore(root, settings.flow_device)
            say_complete(root, selection)
        refuse_gaps(root, selection, errors)
        lineage = {**source(root.plan), **made_now(before, root.done())}
        return {"index": index(root), **root.status(), "lineage": lineage}


@task(task_run_name="plan", **RECORD)
def plan(root: Root, selection: Selection, *, full: bool) -> dict[str, Any]:
    """Put damage aside, and count what is missing."""
    put_damage_aside(root, full=full)
    return {"plan": root.plan.digest, "lacking": len(selection.wanted(root))}


def check_before_shards(root: Root) -> None:
    """What may be refused before any shard is made; prototypes the workers measure."""
    say_notes(config_of(root))
    for kind, ours in root.made_from().items():
        refuse_others(root, kind, ours)


def make(root: Root, settings: SlotSettings, shards: str) -> list[str]:
    """Make shards in slots, and show what came of it; what slots said that ended badly."""
    with making(root, settings, shards) as end:
        return end()


@contextmanager
def making(
    root: Root, settings: SlotSettings, shards: str = "", *, listener: Listener = lambda _: None
) -> Iterator[Callable[[], list[str]]]:
    """Slots work while the block does; what it yields waits for their end, as `make` does."""
    key = artifact_key("build", root.url, root.plan.digest)
    began, before, start = root.progress(), root.done(), time.monotonic()
    check_before_shards(root)
    with (
        running_on(root),
        slots_running(root.url, settings, shards=shards, overrides=root.overrides) as futures,
    ):

        def end() -> list[str]:
            with shown("generate") as show, progress_artifact(key) as publish:
                errors = follow(futures, root, listeners=(listener, show, publish))
            took = time.monotonic() - start
            build_summary(root, key=key, began=began, before=before, seconds=took)
            series_sheet(root, key=key)
            return errors

        yield end


@task(task_run_name="index", **RECORD)
def index(root: Root) -> str:
    return root.write_index()
