"""Label the images of a root under other settings: as a label set, or baked into a new root.

The relabel flow and `_relabel_here`, which needs no flow, both use the steps below.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from semix.data.errors import InputError
from semix.data.formats import PLAN, PROTOTYPES
from semix.data.imagefolder import check_outside_images
from semix.data.label_sets import LabelSet, label_sets
from semix.data.root import Root, RootProgress
from semix.data.store import Store
from semix.data.threads import mapped
from semix.flows.calling import run_flow
from semix.flows.failures import RunFailed, few_ranges, reasons
from semix.flows.progress import progress_display, throttle
from semix.flows.slots import SlotSettings, check_gpu, check_slots
from semix.pipeline.bake import bake_shard, open_baked
from semix.pipeline.checks import check_clip
from semix.pipeline.config import AnnotationConfig, BuildConfig
from semix.pipeline.plan import build_of
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
from semix.pipeline.root import MIXED
from semix.pipeline.shard_job import failure_of

BAKED_AT_A_TIME = 4  # shards; each holds one series in memory

log = logging.getLogger("semix.relabel")


class RelabelFailed(RunFailed):
    """Some shards could not be labelled or baked; everything else is committed."""


@dataclass(frozen=True)
class PreparedLabels:
    """A relabelling that passed all checks.

    Attributes:
        sets: label sets to complete, in order. Empty if the settings are those of the root's own
            labels; two sets if the last one uses the features of the other.
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
    """Make the label set of these settings for all committed images, or continue it.

    Args:
        overrides: texts like `annotation.scale=4`, which change the root's own annotation.
        slots: the number of worker processes, or their settings, if images must be read; by
            default one per visible GPU of this machine, or one. By default, and if stored features
            suffice, this process does the work, without Prefect or workers.
        out: path or URL of a new root to bake the labels into.
    Returns:
        The facts that `semix relabel` shows.
    Raises:
        InputError: settings, paths or URLs that cannot be used.
        RelabelFailed: names the failed shards and how to go on.
    """
    root = Root(root) if isinstance(root, str) else root
    settings = slots if isinstance(slots, SlotSettings) else SlotSettings(slots or 0)
    prepared = prepare_labels(root, overrides, settings, out=out)
    if is_done(prepared, out=out):
        return facts_of(root, prepared.sets, out=out)
    if not reads_images(prepared.sets) and settings == SlotSettings(device=settings.device):
        return _relabel_here(prepared, settings, out=out)
    facts: dict[str, Any] = run_flow(
        "semix.flows.relabel_flow.relabel_flow",
        lambda: resume_hint(root, prepared.sets),
        prepared=prepared,
        url=root.url,
        overrides=list(overrides),
        out=out and Store(out).url,
        slots=settings.count,
        runner=settings.runner,
        cluster=settings.cluster,
        device=settings.device,
    )
    return facts


def list_label_sets(root: Root) -> list[dict[str, Any]]:
    """Settings and progress of each label set of a root."""
    return [set_facts(LabelSet(root, digest)) for digest in label_sets(root)]


def set_facts(labels: LabelSet) -> dict[str, Any]:
    """A set's status, and its settings that differ from those of the root's own labels."""
    return {
        **labels.status(),
        "settings": differing_settings(labels),
        "command": command_of(labels),
    }


def describe_set(facts: Mapping[str, Any]) -> str:
    """One line about a set, and, if shards are missing, the command that completes it."""
    scale = f", scale {facts['scale']}" if "scale" in facts else ""
    line = "{digest:.12}  {done} of {shards} shards  {rule}{sharpened}, {encoder}"
    line = line.format(sharpened=scale, **facts)
    line += f"; {settings_in_words(facts['settings'])}"
    is_incomplete = facts["done"] < facts["shards"]
    return f"{line}\n  complete it: {facts['command']}" if is_incomplete else line


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """`scale: 4.0, rule: simplex`: the settings that differ from those of the root's labels."""
    text = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return f"differs from the root in {text}" if text else "settings of the root"


def _relabel_here(prepared: PreparedLabels, settings: SlotSettings, *, out: str) -> dict[str, Any]:
    """As the flow, for stored features and in this process."""
    root, sets = prepared.root, prepared.sets
    warn_missing_images(root)
    for labels in sets:
        if missing := labels.missing():
            log.info("%s", describe_work(labels, missing))
            ensure_set_prototypes(labels, device=settings.flow_device)
            label_features(labels, missing)
            check_complete(labels)
    if out:
        bake(root, sets, baked_root(prepared, out))
    return facts_of(root, sets, out=out)


# The steps


def prepare_labels(
    root: Root, overrides: Sequence[str], slots: SlotSettings, *, out: str
) -> PreparedLabels:
    """Check the settings, and write set.json of the last label set if it is new.

    Raises:
        InputError: settings, paths or URLs that cannot be used; nothing was written.
    """
    check_gpu(slots)
    config = relabelled_config(root, overrides)
    if out and Store(out).url == root.url:
        raise InputError("out", out, "is the root itself; choose a new place")
    if out and not (store := Store(out)).exists(PLAN):
        if store.local:
            check_outside_images(config.real.folder, store.url)
        # A bake that was killed early leaves prototypes only.
        store.require_empty_or_own(MIXED, own=PROTOTYPES)
    if is_own(root, config):
        return PreparedLabels(root, config, ())
    if not root.done():
        raise InputError("url", root.url, "holds no images to label yet; run `semix resume`")
    feature_source = set_record(root, config.annotation).features
    if feature_source == IMAGES:
        _check_readable(root, config.annotation, slots)
    elif feature_source != ROOT and (source_set := LabelSet(root, feature_source)).missing():
        _check_readable(root, annotation_of(source_set), slots)
    labels = plan_set(root, config)
    needs_other_set = labels.record.features not in (ROOT, IMAGES)
    source_sets = [LabelSet(root, labels.record.features)] if needs_other_set else []
    return PreparedLabels(root, config, [*source_sets, labels])


def _check_readable(root: Root, annotation: AnnotationConfig, slots: SlotSettings) -> None:
    check_slots(slots)
    if not root.store.shared:
        raise InputError("url", root.url, "worker processes cannot share memory; use a path")
    check_clip(annotation)


def reads_images(sets: Sequence[LabelSet]) -> bool:
    """Whether images must be encoded by CLIP."""
    return any(labels.record.features == IMAGES and labels.missing() for labels in sets)


def is_done(prepared: PreparedLabels, *, out: str) -> bool:
    """Whether there is nothing to do; logs that."""
    root, sets = prepared.root, prepared.sets
    if any(labels.missing() for labels in sets):
        return False
    if out and to_bake(root, sets, baked_root(prepared, out)):
        return False
    for labels in sets[-1:]:
        log.info("label set %s: complete, nothing to do", labels.digest[:12])
    if not sets:
        log.info("these are the root's own labels; nothing to do")
    return True


def warn_missing_images(root: Root) -> None:
    missing = root.missing()
    if missing:
        log.warning(
            "%d of %d shards have no images yet; run this again after `semix resume %s`",
            len(missing),
            root.plan.num_shards,
            root.url,
        )


def describe_work(labels: LabelSet, missing: Sequence[int]) -> str:
    inputs = "images" if labels.record.features == IMAGES else "stored features"
    return f"label set {labels.digest[:12]}: {len(missing)} shards from {inputs}"


def label_features(
    labels: LabelSet, missing: Sequence[int], *listeners: Callable[[RootProgress], None]
) -> None:
    """Label these shards in this process, and show the progress."""
    with progress_display("label") as show, throttle(labels.progress, (show, *listeners)) as update:
        plan = build_of(labels.root).plan
        label_stored(labels, missing, plan=plan, made=lambda shard: update())


def resume_hint(root: Root, sets: Sequence[LabelSet]) -> str:
    """How much of a lost run is labelled, and how to go on."""
    labelled = "; ".join(
        f"{len(labels.done())} of {len(root.done())} shards are labelled" for labels in sets[-1:]
    )
    return f"{labelled or 'baked shards stay'}; the same command goes on"


def check_complete(labels: LabelSet, worker_errors: Sequence[str] = ()) -> None:
    """Raise RelabelFailed if images have no labels, whatever the workers reported."""
    missing = labels.missing()
    if not missing:
        return
    total = len(labels.root.done())
    lines = [f"{len(missing)} of {total} shards not labelled: {few_ranges(missing)}"]
    lines += [*reasons(labels.failures(), missing), *worker_errors]
    lines.append("other shards are safe; go on with the same command; damaged shards: semix verify")
    raise RelabelFailed("\n".join(lines))


def baked_root(prepared: PreparedLabels, out: str) -> Root:
    """The new root to bake into, created if it does not exist.

    The labels of the last set are baked, or the root's own if there is no set.

    Raises:
        InputError: `out` cannot be used.
    """
    return open_baked(
        prepared.root, prepared.config, prepared.sets[-1] if prepared.sets else None, out
    )


def to_bake(root: Root, sets: Sequence[LabelSet], target: Root) -> list[int]:
    """Labelled shards that the new root lacks."""
    done = target.done()
    return [shard for shard in (sets[-1] if sets else root).done() if shard not in done]


def bake(
    root: Root, sets: Sequence[LabelSet], target: Root, *listeners: Callable[[RootProgress], None]
) -> None:
    """Bake the shards that the new root lacks, show the progress, and write an index.

    Raises:
        RelabelFailed: images of some shards are damaged; the other shards are baked.
    """
    labels = sets[-1] if sets else None
    todo, plan = to_bake(root, sets, target), build_of(root).plan
    prototypes = sha256(target.store.get(PROTOTYPES)).hexdigest()

    def work(shard: int) -> str:
        try:
            bake_shard(
                shard, source=root, labels=labels, target=target, plan=plan, prototypes=prototypes
            )
        except ValueError as error:
            target.record_failure(failure_of(shard, error))
            return f"shard {shard}: {error}"
        return ""

    errors = {}  # why shards failed
    with progress_display("bake") as show, throttle(target.progress, (show, *listeners)) as update:
        for shard, reason in zip(todo, mapped(work, todo, threads=BAKED_AT_A_TIME), strict=True):
            if reason:
                errors[shard] = reason
            update()
    if errors:
        lines = [f"{len(errors)} of {len(todo)} shards not baked: {few_ranges(errors)}"]
        lines += list(errors.values())[:3]
        lines.append(f"other shards are safe; go on after: semix resume {root.url}")
        raise RelabelFailed("\n".join(lines))
    target.write_index()


def facts_of(root: Root, sets: Sequence[LabelSet], *, out: str = "") -> dict[str, Any]:
    """The facts that `semix relabel` shows, as plain values."""
    facts: dict[str, Any] = {"url": root.url, "digest": None}
    if sets:
        facts |= set_facts(sets[-1])
    if out:
        target = Root(out)
        facts |= {"out": target.url, "baked": len(target.done())}
    return facts
