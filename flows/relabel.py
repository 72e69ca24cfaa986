"""Label the images of a root anew: a further label set, or baked into a root of its own."""

import logging
from collections.abc import Sequence
from typing import Any

from data.errors import InputError
from data.label_sets import LabelSet, label_sets
from data.ranges import format_ranges
from data.root import Root
from data.threads import mapped
from flows.errors import RunFailed
from flows.gpus import visible_gpus
from flows.progress import shown
from flows.server import prefect_server
from pipeline.checks.models import check_clip
from pipeline.config import AnnotationConfig, BuildConfig
from pipeline.relabel.sets import (
    IMAGES,
    ROOT,
    annotation_of,
    is_own,
    plan_set,
    relabelled_config,
    set_record,
)

BAKING_THREADS = 4  # shards at a time; each holds one series in memory

log = logging.getLogger("semix.relabel")


class RelabelFailed(RunFailed):
    """Some shards could not be labelled; everything else is committed."""


def relabel(
    root: Root, overrides: Sequence[str] = (), *, slots: int | None = None, out: str = ""
) -> dict[str, Any]:
    """Make the label set of these settings for all images that are committed, or continue it.

    Args:
        overrides: texts like `annotation.scale=4`, over the root's own annotation.
        slots: worker processes, where images must be read; by default one a visible GPU, or one.
        out: place of a new root to bake the labels into.
    Returns:
        What `semix relabel` shows.
    Raises:
        InputError: settings or places that cannot be used.
        RelabelFailed: names the shards that failed and how to go on.
    """
    config = relabelled_config(root, overrides)
    labels = None if is_own(root, config) else _complete(root, config, slots)
    _say_what_lacks(root)
    facts = _facts(root, labels)
    return facts | _bake(root, config, labels, out) if out else facts


def listed(root: Root) -> list[dict[str, Any]]:
    """A few words about each label set of a root."""
    return [LabelSet(root, digest).status() for digest in label_sets(root)]


def _complete(root: Root, config: BuildConfig, slots: int | None) -> LabelSet:
    if not root.committed():
        raise InputError("url", root.url, "holds no images to label yet; run `semix resume`")
    if set_record(root, config.annotation)["features"] == IMAGES:
        _refuse_unreadable(root, config.annotation)
    labels = plan_set(root, config)
    if labels.plan["features"] not in (ROOT, IMAGES):
        other = LabelSet(root, labels.plan["features"])
        if other.missing():
            log.info("first label set %s, whose features this one uses", other.digest[:12])
        finish(other, slots=slots)
    finish(labels, slots=slots)
    return labels


def finish(labels: LabelSet, *, slots: int | None = None) -> None:
    """Label what a set lacks. Raises RelabelFailed."""
    missing = labels.missing()
    if not missing:
        log.info("label set %s: complete, nothing to do", labels.digest[:12])
        return
    if labels.plan["features"] == IMAGES:
        _from_images(labels, slots)
    else:
        _from_features(labels, missing)
    refuse_gaps(labels)


def _refuse_unreadable(root: Root, annotation: AnnotationConfig) -> None:
    if not root.store.shared:
        raise InputError("url", root.url, "worker processes cannot share memory; use a path")
    check_clip(annotation)


def _from_images(labels: LabelSet, slots: int | None) -> None:
    _refuse_unreadable(labels.root, annotation_of(labels))
    with prefect_server():
        from flows.relabel_flow import run_relabel  # Prefect costs seconds: only with work

        run_relabel(labels, slots or len(visible_gpus()) or 1)


def _from_features(labels: LabelSet, missing: Sequence[int]) -> None:
    from pipeline.relabel.prototypes import ensure_set_prototypes
    from pipeline.relabel.stored import label_stored

    ensure_set_prototypes(labels)
    log.info("label set %s: %d shards from stored features", labels.digest[:12], len(missing))
    label_stored(labels, missing)


def refuse_gaps(labels: LabelSet, last_words: Sequence[str] = ()) -> None:
    """Raises RelabelFailed if images have no labels, whatever the workers say."""
    missing = labels.missing()
    if not missing:
        return
    found = {shard: tries[-1] for shard, tries in labels.failures().items() if shard in missing}
    total = len(labels.root.committed())
    text = [f"{len(missing)} of {total} shards not labelled: {format_ranges(missing)}"]
    for shard, failure in list(found.items())[:3]:
        text.append(f"shard {shard}: {failure['error']}: {failure['message']}")
    text += last_words
    text.append("the rest is safe; go on with the same command; damaged shards: semix verify")
    raise RelabelFailed("\n".join(text))


def _say_what_lacks(root: Root) -> None:
    missing = root.missing()
    if missing:
        log.warning(
            "%d of %d shards have no images yet; run this again after `semix resume %s`",
            len(missing),
            root.plan["num_shards"],
            root.url,
        )


def _facts(root: Root, labels: LabelSet | None) -> dict[str, Any]:
    if labels is not None:
        return {"url": root.url, **labels.status()}
    log.info("these are the root's own labels; nothing to do")
    return {"url": root.url, "digest": None}


def _bake(root: Root, config: BuildConfig, labels: LabelSet | None, out: str) -> dict[str, Any]:
    from pipeline.relabel.bake import bake_shard
    from pipeline.relabel.baked_root import open_baked
    from pipeline.root import plan_of
    from pipeline.work import failure_note

    target = open_baked(root, config, labels, out)
    plan, done = plan_of(root), target.committed()
    ready = root.committed() if labels is None else labels.committed()
    todo = [shard for shard in ready if shard not in done]

    def bake(shard: int) -> str | None:
        try:
            bake_shard(shard, source=root, labels=labels, target=target, plan=plan)
        except ValueError as error:
            target.record_failure(shard, failure_note(error))
            return f"shard {shard}: {error}"
        return None

    with shown("bake") as show:
        reasons = []
        for reason in mapped(bake, todo, threads=BAKING_THREADS):
            reasons += [reason] if reason else []
            show(target.progress())
    if reasons:
        text = [f"{len(reasons)} of {len(ready)} shards not baked", *reasons[:3]]
        text.append(f"the rest is safe; go on after: semix resume {root.url}")
        raise RelabelFailed("\n".join(text))
    target.write_index()
    return {"out": target.url, "baked": len(target.committed())}
