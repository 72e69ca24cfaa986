"""Label the images of a root anew: a further label set, or baked into a root of its own."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from data.errors import InputError
from data.formats import PLAN, PROTOTYPES
from data.label_sets import LabelSet, label_sets
from data.root import Progress, Root
from data.store import Store
from flows.progress import now_and_then, shown
from flows.relabel_end import RelabelFailed, facts_of, refuse_gaps
from flows.server.run_server import prefect_server
from flows.slots.settings import SlotSettings, check_slots
from pipeline.checks import check_clip
from pipeline.config import AnnotationConfig, BuildConfig
from pipeline.relabel import (
    IMAGES,
    ROOT,
    annotation_of,
    is_own,
    plan_set,
    relabelled_config,
    set_record,
)
from pipeline.root import MIXED

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
        from flows.calling import call_flow  # Prefect costs seconds: only with work
        from flows.relabel_flow import relabel_flow

        return call_flow(
            relabel_flow,
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


def planned(root: Root, config: BuildConfig, slots: SlotSettings, *, out: str) -> list[LabelSet]:
    """The label sets to complete, in order; set.json of the last is written where it is new.

    No set if the settings are those of the root's own labels; two if the features of the last
    are those of another.

    Raises:
        InputError: settings or places that cannot be used; nothing was written.
    """
    if out and Store(out).url == root.url:
        raise InputError("out", out, "is the root itself; choose a new place")
    if out and not (store := Store(out)).exists(PLAN):
        # A bake that was killed at its beginning left these.
        store.refuse_strangers(MIXED, own=PROTOTYPES)
    if is_own(root, config):
        return []
    if not root.done():
        raise InputError("url", root.url, "holds no images to label yet; run `semix resume`")
    source = set_record(root, config.annotation).features
    if source == IMAGES:
        _check_readable(root, config.annotation, slots)
    elif source != ROOT and (other := LabelSet(root, source)).missing():
        _check_readable(root, annotation_of(other), slots)
    labels = plan_set(root, config)
    from_other = labels.record.features not in (ROOT, IMAGES)
    return [*([LabelSet(root, labels.record.features)] if from_other else []), labels]


def reads_images(sets: Sequence[LabelSet]) -> bool:
    """Whether an image has to pass through CLIP."""
    return any(labels.record.features == IMAGES and labels.missing() for labels in sets)


def _relabelled_here(
    root: Root, config: BuildConfig, sets: Sequence[LabelSet], settings: SlotSettings, *, out: str
) -> dict[str, Any]:
    """As the flow does, from stored features."""
    from flows.bake import bake, opened
    from pipeline.relabel import ensure_set_prototypes

    say_what_lacks(root)
    for labels in sets:
        if missing := labels.missing():
            log.info("%s", what_comes(labels, missing))
            ensure_set_prototypes(labels, device=settings.flow_device)
            label_features(labels, missing)
            refuse_gaps(labels)
    if out:
        bake(root, sets, opened(root, config, sets, out))
    return facts_of(root, sets, out=out)


def what_comes(labels: LabelSet, missing: Sequence[int]) -> str:
    what = "images" if labels.record.features == IMAGES else "stored features"
    return f"label set {labels.digest[:12]}: {len(missing)} shards from {what}"


def label_features(
    labels: LabelSet, missing: Sequence[int], *listeners: Callable[[Progress], None]
) -> None:
    """Label these shards in this process, and show how far it is."""
    from pipeline.relabel import label_stored

    with (
        shown("label") as show,
        now_and_then(labels.progress, (show, *listeners)) as look,
    ):
        label_stored(labels, missing, made=lambda shard: look())


def is_done(root: Root, config: BuildConfig, sets: Sequence[LabelSet], *, out: str) -> bool:
    """Whether a run would find nothing to make; says so."""
    if any(labels.missing() for labels in sets):
        return False
    if out:
        from flows.bake import opened, to_bake  # torch costs seconds

        if to_bake(root, sets, opened(root, config, sets, out)):
            return False
    for labels in sets[-1:]:
        log.info("label set %s: complete, nothing to do", labels.digest[:12])
    if not sets:
        log.info("these are the root's own labels; nothing to do")
    return True


def say_what_lacks(root: Root) -> None:
    missing = root.missing()
    if missing:
        log.warning(
            "%d of %d shards have no images yet; run this again after `semix resume %s`",
            len(missing),
            root.plan.num_shards,
            root.url,
        )


def _check_readable(root: Root, annotation: AnnotationConfig, slots: SlotSettings) -> None:
    check_slots(slots)
    if not root.store.shared:
        raise InputError("url", root.url, "worker processes cannot share memory; use a path")
    check_clip(annotation)
