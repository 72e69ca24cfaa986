"""Label the images of a root anew: a further label set, or baked into a root of its own."""

import logging
from collections.abc import Sequence
from typing import Any

from data.label_sets import LabelSet, label_sets
from data.root import Root
from data.store import Store
from flows.relabel_steps import (
    RelabelFailed,
    bake,
    baked_root,
    facts_of,
    is_done,
    kept,
    label_features,
    planned,
    reads_images,
    refuse_gaps,
    say_what_lacks,
    what_comes,
)
from flows.server.run_server import prefect_server
from flows.slots import SlotSettings
from pipeline.config import BuildConfig
from pipeline.relabel import ensure_set_prototypes, relabelled_config

__all__ = ["RelabelFailed", "listed", "relabel"]

log = logging.getLogger("semix.relabel")


def relabel(
    root: Root | str,
    overrides: Sequence[str] = (),
    *,
    slots: SlotSettings | int | None = None,
    out: str = "",
) -> dict[str, Any]:
    """Make the label set of these settings for all images that are committed, or continue it.

    Args:
        overrides: texts like `annotation.scale=4`, over the root's own annotation.
        slots: how many worker processes, or where and what they are, if images must be read; by
            default one a visible GPU of this machine, or one. Without, and where stored features
            serve, this process does it, and neither Prefect nor a worker is started.
        out: place of a new root to bake the labels into.
    Returns:
        What `semix relabel` shows.
    Raises:
        InputError: settings or places that cannot be used.
        RelabelFailed: names the shards that failed and how to go on.
    """
    root = Root(root) if isinstance(root, str) else root
    settings = slots if isinstance(slots, SlotSettings) else SlotSettings(slots or 0)
    config = relabelled_config(root, overrides)
    sets = planned(root, config, settings, out=out)
    if is_done(root, config, sets, out=out):
        return facts_of(root, sets, out=out)
    if not reads_images(sets) and settings == SlotSettings(device=settings.device):
        return _relabelled_here(root, config, sets, settings, out=out)
    with prefect_server():
        from flows.flow_runs import call_flow  # Prefect costs seconds: only with work
        from flows.relabel_flow import relabel_flow

        return call_flow(
            relabel_flow,
            lambda: kept(root, sets),
            url=root.url,
            overrides=list(overrides),
            out=out and Store(out).url,
            slots=settings.count,
            runner=settings.runner,
            cluster=settings.cluster,
            device=settings.device,
        )


def listed(root: Root) -> list[dict[str, Any]]:
    """A few words about each label set of a root."""
    return [LabelSet(root, digest).status() for digest in label_sets(root)]


def _relabelled_here(
    root: Root, config: BuildConfig, sets: Sequence[LabelSet], settings: SlotSettings, *, out: str
) -> dict[str, Any]:
    """As the flow does, from stored features."""
    say_what_lacks(root)
    for labels in sets:
        if missing := labels.missing():
            log.info("%s", what_comes(labels, missing))
            ensure_set_prototypes(labels, device=settings.flow_device)
            label_features(labels, missing)
            refuse_gaps(labels)
    if out:
        bake(root, sets, baked_root(root, config, sets, out))
    return facts_of(root, sets, out=out)
