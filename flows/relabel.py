"""Label the images of a root anew: a further label set, or baked into a root of its own.

Both the flow and a run without one make it of the steps here.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semix.data.errors import InputError
from semix.data.formats import PLAN, PROTOTYPES
from semix.data.imagefolder import refuse_among_pictures
from semix.data.label_sets import LabelSet, label_sets
from semix.data.root import Root, RootProgress
from semix.data.store import Store
from semix.data.threads import mapped
from semix.flows.calling import run_flow
from semix.flows.failures import RunFailed, few_ranges, reasons
from semix.flows.progress import now_and_then, shown
from semix.flows.slots import SlotSettings, check_gpu, check_slots
from semix.pipeline.bake import bake_shard, open_baked
from semix.pipeline.checks import check_clip
from semix.pipeline.config import AnnotationConfig, BuildConfig
from semix.pipeline.plan import BuildPlan
from semix.pipeline.relabel import (
    IMAGES,
    ROOT,
    annotation_of,
    command_of,
    differing_settings,
    ensure_set_prototypes,
    is_own,
    label_stored,
    plan_set,
    relabelled_config,
    set_record,
)
from semix.pipeline.root import MIXED, plan_of
from semix.pipeline.shard_job import failure_of

BAKED_AT_A_TIME = 4  # shards; each holds one series in memory

log = logging.getLogger("semix.relabel")


class RelabelFailed(RunFailed):
    """Some shards could not be labelled or baked; everything else is committed."""


@dataclass(frozen=True)
class ReadyLabels:
    """What shall be labelled, which nothing speaks against.

    Attributes:
        sets: to complete, in order. None if the settings are those of the root's own labels; two
            if the features of the last are those of another.
    """

    root: Root
    config: BuildConfig
    sets: Sequence[LabelSet]


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
    ready = planned(root, overrides, settings, out=out)
    if is_done(ready, out=out):
        return facts_of(root, ready.sets, out=out)
    if not reads_images(ready.sets) and settings == SlotSettings(device=settings.device):
        return _relabelled_here(ready, settings, out=out)
    facts: dict[str, Any] = run_flow(
        "semix.flows.relabel_flow.relabel_flow",
        lambda: kept(root, ready.sets),
        ready=ready,
        url=root.url,
        overrides=list(overrides),
        out=out and Store(out).url,
        slots=settings.count,
        runner=settings.runner,
        cluster=settings.cluster,
        device=settings.device,
    )
    return facts


def listed(root: Root) -> list[dict[str, Any]]:
    """About each label set of a root: how it was made, and how far it is."""
    return [set_facts(LabelSet(root, digest)) for digest in label_sets(root)]


def set_facts(labels: LabelSet) -> dict[str, Any]:
    """A set's status, and its settings that are not those of the root's own labels."""
    return {
        **labels.status(),
        "settings": differing_settings(labels),
        "command": command_of(labels),
    }


def in_words(facts: Mapping[str, Any]) -> str:
    """A line about a set, and below the command that completes it, where shards are missing."""
    scale = f", scale {facts['scale']}" if "scale" in facts else ""
    line = "{digest:.12}  {done} of {shards} shards  {rule}{sharpened}, {encoder}"
    line = line.format(sharpened=scale, **facts)
    line += f"; {settings_in_words(facts['settings'])}"
    lacks = facts["done"] < facts["shards"]
    return f"{line}\n  complete it: {facts['command']}" if lacks else line


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """`scale: 4.0, rule: simplex`, of what differs from the root's own labels."""
    text = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return f"differs from the root in {text}" if text else "settings as the root's"


def _relabelled_here(ready: ReadyLabels, settings: SlotSettings, *, out: str) -> dict[str, Any]:
    """As the flow does, from stored features."""
    root, sets = ready.root, ready.sets
    say_what_lacks(root)
    for labels in sets:
        if missing := labels.missing():
            log.info("%s", what_comes(labels, missing))
            ensure_set_prototypes(labels, device=settings.flow_device)
            label_features(labels, missing)
            refuse_gaps(labels)
    if out:
        bake(root, sets, baked_root(ready, out))
    return facts_of(root, sets, out=out)


# The steps


def planned(root: Root, overrides: Sequence[str], slots: SlotSettings, *, out: str) -> ReadyLabels:
    """Checked, and set.json of the last label set written where it is new.

    Raises:
        InputError: settings or places that cannot be used; nothing was written.
    """
    check_gpu(slots)
    config = relabelled_config(root, overrides)
    if out and Store(out).url == root.url:
        raise InputError("out", out, "is the root itself; choose a new place")
    if out and not (store := Store(out)).exists(PLAN):
        if store.local:
            refuse_among_pictures(config.real.path, store.url)
        # A bake that was killed at its beginning left these.
        store.require_empty_or_own(MIXED, own=PROTOTYPES)
    if is_own(root, config):
        return ReadyLabels(root, config, ())
    if not root.done():
        raise InputError("url", root.url, "holds no images to label yet; run `semix resume`")
    source = set_record(root, config.annotation).features
    if source == IMAGES:
        _check_readable(root, config.annotation, slots)
    elif source != ROOT and (other := LabelSet(root, source)).missing():
        _check_readable(root, annotation_of(other), slots)
    labels = plan_set(root, config)
    from_other = labels.record.features not in (ROOT, IMAGES)
    first = [LabelSet(root, labels.record.features)] if from_other else []
    return ReadyLabels(root, config, [*first, labels])


def _check_readable(root: Root, annotation: AnnotationConfig, slots: SlotSettings) -> None:
    check_slots(slots)
    if not root.store.shared:
        raise InputError("url", root.url, "worker processes cannot share memory; use a path")
    check_clip(annotation)


def reads_images(sets: Sequence[LabelSet]) -> bool:
    """Whether an image has to pass through CLIP."""
    return any(labels.record.features == IMAGES and labels.missing() for labels in sets)


def is_done(ready: ReadyLabels, *, out: str) -> bool:
    """Whether a run would find nothing to make; says so."""
    root, sets = ready.root, ready.sets
    if any(labels.missing() for labels in sets):
        return False
    if out and to_bake(root, sets, baked_root(ready, out)):
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


def what_comes(labels: LabelSet, missing: Sequence[int]) -> str:
    what = "images" if labels.record.features == IMAGES else "stored features"
    return f"label set {labels.digest[:12]}: {len(missing)} shards from {what}"


def label_features(
    labels: LabelSet, missing: Sequence[int], *listeners: Callable[[RootProgress], None]
) -> None:
    """Label these shards in this process, and show how far it is."""
    with (
        shown("label") as show,
        now_and_then(labels.progress, (show, *listeners)) as look,
    ):
        label_stored(labels, missing, made=lambda shard: look())


def kept(root: Root, sets: Sequence[LabelSet]) -> str:
    """What is safe of a run that was lost, and the command that goes on."""
    labelled = "; ".join(
        f"{len(labels.done())} of {len(root.done())} shards are labelled" for labels in sets[-1:]
    )
    return f"{labelled or 'what was baked stays'}; the same command goes on"


def refuse_gaps(labels: LabelSet, last_words: Sequence[str] = ()) -> None:
    """Raises RelabelFailed if images have no labels, whatever the workers say."""
    missing = labels.missing()
    if not missing:
        return
    total = len(labels.root.done())
    text = [f"{len(missing)} of {total} shards not labelled: {few_ranges(missing)}"]
    text += [*reasons(labels.failures(), missing), *last_words]
    text.append("the rest is safe; go on with the same command; damaged shards: semix verify")
    raise RelabelFailed("\n".join(text))


def baked_root(ready: ReadyLabels, out: str) -> Root:
    """The new root to bake into, begun where it is new.

    The labels of the last set are baked; the root's own if there is none.

    Raises:
        InputError: the place cannot be used.
    """
    return open_baked(ready.root, ready.config, ready.sets[-1] if ready.sets else None, out)


def to_bake(root: Root, sets: Sequence[LabelSet], target: Root) -> list[int]:
    """Labelled shards that the new root lacks."""
    done = target.done()
    return [shard for shard in (sets[-1] if sets else root).done() if shard not in done]


def bake(
    root: Root, sets: Sequence[LabelSet], target: Root, *listeners: Callable[[RootProgress], None]
) -> None:
    """Bake what the new root lacks, show how far it is, and pin what it then has.

    Raises:
        RelabelFailed: shards whose images are damaged; the others are baked.
    """
    labels = sets[-1] if sets else None
    todo, plan = to_bake(root, sets, target), plan_of(root)

    def work(shard: int) -> str:
        return _bake_one(shard, root=root, labels=labels, target=target, plan=plan)

    failed = {}
    with (
        shown("bake") as show,
        now_and_then(target.progress, (show, *listeners)) as look,
    ):
        for shard, reason in zip(todo, mapped(work, todo, threads=BAKED_AT_A_TIME), strict=True):
            if reason:
                failed[shard] = reason
            look()
    if failed:
        text = [f"{len(failed)} of {len(todo)} shards not baked: {few_ranges(failed)}"]
        text += list(failed.values())[:3]
        text.append(f"the rest is safe; go on after: semix resume {root.url}")
        raise RelabelFailed("\n".join(text))
    target.write_index()


def _bake_one(
    shard: int, *, root: Root, labels: LabelSet | None, target: Root, plan: BuildPlan
) -> str:
    """Why it could not be baked; empty if it was."""
    try:
        bake_shard(shard, source=root, labels=labels, target=target, plan=plan)
    except ValueError as error:
        target.record_failure(failure_of(shard, error))
        return f"shard {shard}: {error}"
    return ""


def facts_of(root: Root, sets: Sequence[LabelSet], *, out: str = "") -> dict[str, Any]:
    """What `semix relabel` shows, as plain values."""
    facts: dict[str, Any] = {"url": root.url, "digest": None}
    if sets:
        facts |= set_facts(sets[-1])
    if out:
        target = Root(out)
        facts |= {"out": target.url, "baked": len(target.done())}
    return facts
