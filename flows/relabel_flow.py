"""The Prefect relabel flow: label from stored features or from images, and bake labels.

As in a build, Prefect shows progress, retries and fails; only the store says what is done.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import flow, task

from semix.data.label_sets import LabelSet
from semix.data.root import Root
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, facts_table, progress_artifact
from semix.flows.calling import from_caller
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.progress import progress_display
from semix.flows.relabel import (
    PreparedLabels,
    bake,
    baked_root,
    check_complete,
    describe_work,
    facts_of,
    label_features,
    prepare_labels,
    warn_missing_images,
)
from semix.flows.slots import SlotSettings
from semix.flows.slots.running import follow, run_slots
from semix.flows.slots.slot import RECORD
from semix.pipeline.relabel import IMAGES, ensure_set_prototypes

log = logging.getLogger("semix.relabel")


def run_name(parameters: Mapping[str, Any]) -> str:
    """`label mixed: annotation.scale=4, baked into sharp`."""
    name = f"label {base_name(parameters['url'])}"
    changes = f": {' '.join(parameters['overrides'])}" if parameters["overrides"] else ""
    return f"{name}{changes[:80]}" + (
        f", baked into {base_name(parameters['out'])}" * bool(parameters["out"])
    )


@flow(**flow_options("relabel", run_name))
def relabel_flow(
    url: p.Root,
    overrides: p.AnnotationOverrides = [],  # noqa: B006 - Prefect copies it
    out: p.BakedOut = "",
    slots: p.Slots = 0,
    runner: p.Runner = "local",
    cluster: p.Cluster = "",
    device: p.Device = "auto",
) -> dict[str, Any]:
    """Label the images of a mixed dataset under other settings, beside their present labels.

    Stored features are used where possible; else images are read, in slots. Start it again at any
    time: labelled shards stay.
    """
    settings = SlotSettings(slots, runner, cluster, device=device)
    with run_context("relabel"):
        prepared = from_caller(PreparedLabels) or prepare_labels(
            Root(url), overrides, settings, out=out
        )
        root, sets = prepared.root, prepared.sets
        warn_missing_images(root)
        key = artifact_key("relabel", root.url, *(labels.digest for labels in sets[-1:]))
        for labels in sets:
            complete(labels, settings, key=key)
        if out:
            bake_labels(root, sets, baked_root(prepared, out), key=key)
        facts = facts_of(root, sets, out=out)
        facts_table(facts, key=key, description="labels of existing images")
        return facts


def complete(labels: LabelSet, settings: SlotSettings, *, key: str) -> None:
    """Label the missing shards of a set. Raises RelabelFailed."""
    missing = labels.missing()
    if not missing:
        return
    errors: list[str] = []
    log.info("%s", describe_work(labels, missing))
    prototypes(labels, settings.flow_device)
    if labels.record.features == IMAGES:
        errors = label_images(labels, settings, key=key)
    else:
        label_stored_features(labels, missing, key=key)
    check_complete(labels, errors)


@task(task_run_name="prototypes", **RECORD)
def prototypes(labels: LabelSet, device: str) -> None:
    ensure_set_prototypes(labels, device=device)


def label_images(labels: LabelSet, settings: SlotSettings, *, key: str) -> list[str]:
    """Label images in slots; returns the errors of slots."""
    url = labels.root.url
    with (
        run_slots(url, settings, labels=labels.digest) as futures,
        progress_display("label") as show,
        progress_artifact(key) as publish,
    ):
        return follow(futures, labels, listeners=(show, publish))


@task(task_run_name="label from features", **RECORD)
def label_stored_features(labels: LabelSet, missing: Sequence[int], *, key: str) -> None:
    with progress_artifact(key) as publish:
        label_features(labels, missing, publish)


@task(task_run_name="bake", **RECORD)
def bake_labels(root: Root, sets: Sequence[LabelSet], target: Root, *, key: str) -> None:
    with progress_artifact(f"{key}-baked") as publish:
        bake(root, sets, target, publish)
