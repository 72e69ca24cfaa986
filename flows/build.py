"""Build or continue a mixed dataset: make the missing shards, then write an index of all."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from semix.data.errors import InputError
from semix.data.formats import PairWeighting
from semix.data.layout import segment_of
from semix.data.ranges import format_ranges
from semix.data.root import Root
from semix.data.settings import whole_path
from semix.data.store import Store
from semix.flows.build_steps import (
    ALL_SHARDS,
    BuildFailed,
    ShardSelection,
    check_complete,
    check_work,
    index_or_quarantine,
    log_complete,
    log_ignored_files,
    log_notes,
    restore_prototypes,
    resume_hint,
)
from semix.flows.calling import run_flow
from semix.flows.configs import load_config
from semix.flows.costs import DEFAULT_SHARE, check_rates, costs
from semix.flows.series_by_run import series_of_config, share_by_run, start_build
from semix.flows.slots import SlotSettings, check_gpu, check_slots, prepare_workers
from semix.pipeline.config import EVEN_SHARE, BuildConfig, hard_label_notes
from semix.pipeline.plan import Build, build_of, check_overrides
from semix.pipeline.prototypes import stored_scale
from semix.pipeline.root import (
    build_to_continue,
    checked_plan,
    extend_root,
    extend_root_by_run,
    running_on,
)

__all__ = ["BuildFailed", "build", "check", "extend", "extend_by_run", "extend_to", "resume"]

log = logging.getLogger("semix.build")


def build(
    config: BuildConfig | str | Path,
    out: str,
    *,
    overrides: Sequence[str] = (),
    slots: SlotSettings | int | None = None,
    selection: ShardSelection = ALL_SHARDS,
    full: bool = False,
) -> Root:
    """Start or continue the mixed dataset of `config` at `out`.

    Args:
        config: settings, or the path or URL of a YAML file of them; `overrides` as in
            `section.key=value`.
        slots: the number of worker processes, or their settings; by default one per visible GPU
            of this machine, or one.
        selection: which shards to make; all by default.
        full: first read every committed file, not only its size.
    Returns:
        The root, with every selected shard committed and an index written.
    Raises:
        InputError: `config` or `out` cannot be used; nothing was started.
        BuildFailed: names the failed shards and the command to go on.
    """
    config_source = config.model_dump(mode="json") if isinstance(config, BuildConfig) else config
    settings = slots if isinstance(slots, SlotSettings) else SlotSettings(slots or 0)
    config_values = load_config(BuildConfig, config_source, overrides)
    opened = start_build(config_values, out, device=settings.flow_device)
    # The flow reads the settings of a BuildConfig from plan.json.
    path = "" if isinstance(config, BuildConfig) else whole_path(config)
    used_overrides = overrides if path else opened.overrides
    if full or not _is_complete(opened.root, opened.overrides, settings, selection):
        check_slots(settings)
        _run_build(opened, path, used_overrides, settings, selection=selection, full=full)
    return opened.root


def resume(
    root: Root | str,
    *,
    overrides: Sequence[str] = (),
    slots: SlotSettings | int | None = None,
    selection: ShardSelection = ALL_SHARDS,
    full: bool = False,
) -> Root:
    """Continue a root from its store alone; otherwise as `build`.

    Damaged files are quarantined and made again: committed shards whose files are missing or cut,
    and prototypes that cannot be read.

    Args:
        root: an open root, or its path or URL.
        overrides: new paths of models and images, as `generator.model=PATH`.
    """
    settings = slots if isinstance(slots, SlotSettings) else SlotSettings(slots or 0)
    root = Root(root) if isinstance(root, str) else root
    check_overrides(overrides)
    if full or not _is_complete(root, overrides, settings, selection):
        check_slots(settings)
        opened = build_of(root, overrides)
        _run_build(opened, "", overrides, settings, selection=selection, full=full)
    return root


def _is_complete(
    root: Root, overrides: Sequence[str], settings: SlotSettings, selection: ShardSelection
) -> bool:
    """Whether nothing has to be made; then the index is written, and no settings are read."""
    if selection.shards_to_make(root):
        return False
    check_gpu(settings)
    restore_prototypes(root, overrides, settings.flow_device)
    check_complete(root, selection)
    if not index_or_quarantine(root):
        return False
    log_complete(root, selection)
    return True


def _run_build(
    opened: Build,
    config: str,
    overrides: Sequence[str],
    settings: SlotSettings,
    *,
    selection: ShardSelection,
    full: bool,
) -> None:
    """Run the build flow, after all checks."""
    root = opened.root
    check_work(opened, selection)
    # Workers start while Prefect is imported.
    with running_on(root), prepare_workers(settings, url=root.url):
        run_flow(
            "semix.flows.build_flow.build_flow",
            lambda: resume_hint(root),
            prepared=opened,
            out=root.url,
            config=config,
            overrides=list(overrides),
            slots=settings.count,
            runner=settings.runner,
            cluster=settings.cluster,
            range=settings.range,
            shards=format_ranges(sorted(selection.shards)),
            retry_failed=selection.retry_failed,
            skip_failed=selection.skip_failed,
            full=full,
            device=settings.device,
        )


def extend(
    root: Root | str, groups_per_pair: int, *, slots: SlotSettings | int | None = None
) -> Root:
    """Extend a root to `groups_per_pair` series per pair, and make the new ones.

    Raises:
        InputError: there is nothing to add, or it cannot be added.
        BuildFailed: as for `build`; the extension stays, and `semix resume` goes on.
    """
    root = extend_root(Root(root) if isinstance(root, str) else root, groups_per_pair)
    return _make_extension(root, slots)


def extend_by_run(
    root: Root | str,
    run: str | Path,
    series: int,
    *,
    by: PairWeighting = "confusion",
    even: float = EVEN_SHARE,
    slots: SlotSettings | int | None = None,
) -> Root:
    """Add series to a root, the more to a pair the more a run's classifiers confuse it.

    Args:
        run: folder of a finished run that set images aside: `real.set_aside_per_class`.
        series: how many to add in all.
        by, even: as in `mixing.pairs`.
    Raises:
        InputError: the run cannot be used, or the series cannot be added; nothing was added.
        BuildFailed: as for `build`; the extension stays, and `semix resume` goes on.
    """
    root = Root(root) if isinstance(root, str) else root
    if series < 1:
        raise InputError("series", series, "give the number of series to add, at least 1")
    if not 0 <= even <= 1:
        raise InputError("even", even, "give a share between 0 and 1")
    device = slots.flow_device if isinstance(slots, SlotSettings) else "auto"
    names = root.plan.class_names
    share = partial(share_by_run, run, series, by=by, even=even, class_names=names, device=device)
    return _make_extension(extend_root_by_run(root, series, share), slots)


def _make_extension(root: Root, slots: SlotSettings | int | None) -> Root:
    segment = segment_of(root.extensions[-1])
    groups, shards = (
        (segment.first_group, segment.last_group),
        (segment.first_shard, segment.last_shard),
    )
    log.info("%s: added groups %d to %d, shards %d to %d", root.url, *groups, *shards)
    return resume(root, slots=slots)


def extend_to(config: BuildConfig, out: str, *, slots: SlotSettings | int | None = None) -> Root:
    """Extend the root at `out` to the series per pair of `config`; its other settings are the same.

    Raises:
        InputError, BuildFailed: as for `extend`.
    """
    root, groups_per_pair = Root(out), config.mixing.groups_per_pair
    planned = root.stored_plan.groups_per_pair
    mixing = config.mixing.model_copy(update={"groups_per_pair": planned})
    if build_to_continue(config.model_copy(update={"mixing": mixing}), out) is None:
        remedy = "holds another plan, of which no shard was made; `semix build` replaces that plan"
        raise InputError("out", out, remedy)
    return extend(root, groups_per_pair, slots=slots)


def check(
    config: BuildConfig,
    out: str,
    *,
    share: float = DEFAULT_SHARE,
    rate: float | None = None,
    device: str = "auto",
    time: bool = False,
) -> dict[str, Any]:
    """Check everything cheap that `build` would refuse; return what it would make and cost.

    It writes nothing. Other arguments are those of `semix.flows.costs.costs`.

    Raises:
        InputError: as for `build`; also for real images that cannot be decoded, a share or rate
            out of range, and too little space.
    """
    check_rates(share, rate)
    store = Store(out)
    if opened := build_to_continue(config, out):
        plan, missing = opened.plan, len(opened.root.missing())
    else:
        plan = checked_plan(config, store)
        if config.mixing.pairs.kind == "confused":
            series_of_config(config, plan.class_names, device=device)  # raises if it cannot
        missing = plan.num_shards
        store.check_writable(tidy=True)
    log_notes(config)
    if opened and config.annotation.scale == "auto" and config.annotation.rule == "projection":
        for note in hard_label_notes(stored_scale(opened.root)):
            log.warning("%s", note)
    if config.real.name == "imagefolder":
        log_ignored_files(config.real)
    facts = costs(plan, store, missing=missing, share=share, rate=rate, device=device, time=time)
    return {"out": store.url, "classes": len(plan.class_names), **facts}
