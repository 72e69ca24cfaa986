"""Build or continue a mixed dataset: whatever its store lacks is made, then pinned by an index."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semix.data.errors import InputError
from semix.data.layout import segment_of
from semix.data.ranges import format_ranges
from semix.data.root import Root
from semix.data.settings import whole_path
from semix.data.store import Store
from semix.flows.build_steps import (
    ALL,
    BuildFailed,
    Selection,
    check_work,
    kept,
    put_damage_aside,
    refuse_gaps,
    restore,
    say_complete,
    say_notes,
    say_what_is_ignored,
)
from semix.flows.calling import run_flow
from semix.flows.configs import load_config
from semix.flows.costs import SHARE, check_rates, costs
from semix.flows.slots import SlotSettings, check_gpu, workers_ahead
from semix.pipeline.config import BuildConfig, hard_labels
from semix.pipeline.prototypes import stored_scale
from semix.pipeline.root import (
    checked_plan,
    create_root,
    extend_root,
    open_root,
    plan_of,
    root_to_continue,
    running_on,
)

__all__ = ["BuildFailed", "build", "check", "extend", "extend_to", "resume"]

log = logging.getLogger("semix.build")


def build(
    config: BuildConfig | str | Path,
    out: str,
    *,
    overrides: Sequence[str] = (),
    slots: SlotSettings | int | None = None,
    selection: Selection = ALL,
    full: bool = False,
) -> Root:
    """Start or continue the mixed dataset of `config` at `out`.

    Args:
        config: settings, or the path or URL of a YAML file of them; `overrides` as in
            `section.key=value`.
        slots: how many worker processes, or where and what they are; by default one a visible
            GPU of this machine, or one.
        selection: which shards to make; all by default.
        full: read every committed file first, not only its size.
    Returns:
        The root, every wanted shard committed and an index written.
    Raises:
        InputError: the config or the place cannot be used; nothing was started.
        BuildFailed: names the shards that failed and the command to go on.
    """
    source = config.model_dump(mode="json") if isinstance(config, BuildConfig) else config
    root = create_root(load_config(BuildConfig, source, overrides), out)
    file = "" if isinstance(config, BuildConfig) else whole_path(config)  # plan.json has it
    given = overrides if file else root.overrides
    return _made(root, file, given, slots=slots, selection=selection, full=full)


def resume(
    root: Root | str,
    *,
    overrides: Sequence[str] = (),
    slots: SlotSettings | int | None = None,
    selection: Selection = ALL,
    full: bool = False,
) -> Root:
    """Continue a root, or that at a place, from its store alone; else as `build`.

    What is damaged is put aside and made again: committed shards whose files are missing or cut,
    prototypes that cannot be read.

    Args:
        overrides: where things lie here that the root at a place was begun with, as
            `generator.model=PLACE`.
    """
    root = open_root(root, overrides) if isinstance(root, str) else root
    return _made(root, "", root.overrides, slots=slots, selection=selection, full=full)


def _made(
    root: Root,
    config: str,
    overrides: Sequence[str],
    *,
    slots: SlotSettings | int | None,
    selection: Selection,
    full: bool,
) -> Root:
    """Run the flow on a root, if it has anything to do; what it would refuse is refused before."""
    settings = slots if isinstance(slots, SlotSettings) else SlotSettings(slots or 0)
    if not (full or selection.wanted(root)):
        check_gpu(settings)
        put_damage_aside(root)
        if not selection.wanted(root):
            restore(root, settings.flow_device)
            say_complete(root, selection)
            refuse_gaps(root, selection)
            root.write_index()
            return root
    check_work(root, settings, selection)
    # Workers start beside Prefect's imports.
    with running_on(root), workers_ahead(settings, url=root.url):
        run_flow(
            "semix.flows.build_flow.build_flow",
            lambda: kept(root),
            ready=root,
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
    return root


def extend(
    root: Root | str, groups_per_pair: int, *, slots: SlotSettings | int | None = None
) -> Root:
    """Add series behind the last of a root, up to so many of each pair, and make them.

    Raises:
        InputError: there is nothing to add, or it cannot be added.
        BuildFailed: as of `build`; the extension stands, and `semix resume` goes on.
    """
    root = extend_root(Root(root) if isinstance(root, str) else root, groups_per_pair)
    added = segment_of(root.extensions[-1])
    groups, shards = (added.first_group, added.last_group), (added.first_shard, added.last_shard)
    log.info("%s: added groups %d to %d, shards %d to %d", root.url, *groups, *shards)
    return resume(root, slots=slots)


def extend_to(config: BuildConfig, out: str, *, slots: SlotSettings | int | None = None) -> Root:
    """Raise the series of each pair at `out` to what `config` says, which agrees otherwise.

    Raises:
        InputError, BuildFailed: as of `extend`.
    """
    root, wanted = Root(out), config.mixing.groups_per_pair
    planned = root.plan.config["mixing"]["groups_per_pair"]
    mixing = config.mixing.model_copy(update={"groups_per_pair": planned})
    if root_to_continue(config.model_copy(update={"mixing": mixing}), out) is None:
        remedy = "nothing was made of it, and it holds another plan; `semix build` replaces that"
        raise InputError("out", out, remedy)
    return extend(root, wanted, slots=slots)


def check(
    config: BuildConfig,
    out: str,
    *,
    share: float = SHARE,
    rate: float | None = None,
    device: str = "auto",
    time: bool = False,
) -> dict[str, Any]:
    """Everything cheap that `build` would refuse, and what it would make and cost.

    Writes nothing. Other arguments as of `semix.flows.costs.costs`.

    Raises:
        InputError: as `build`; besides, real images that cannot be decoded, a share or rate out
            of range, too little space.
    """
    check_rates(share, rate)
    store = Store(out)
    if root := root_to_continue(config, out):
        plan, missing = plan_of(root), len(root.missing())
    else:
        plan = checked_plan(config, store)
        missing = plan.num_shards
        store.check_writable(tidy=True)
    say_notes(config)
    if root and config.annotation.scale == "auto" and config.annotation.rule == "projection":
        for note in hard_labels(stored_scale(root)):
            log.warning("%s", note)
    if config.real.name == "imagefolder":
        say_what_is_ignored(config.real)
    found = costs(plan, store, missing=missing, share=share, rate=rate, device=device, time=time)
    return {"out": store.url, "classes": len(plan.class_names), **found}
