"""Build or continue a mixed dataset: whatever its store lacks is made, then pinned by an index."""

import logging
from collections.abc import Iterable
from typing import Any

from data.errors import InputError
from data.ranges import format_ranges
from data.repair import put_aside
from data.root import PLAN, Root
from data.store import Store
from flows.costs import SHARE, check_rates, costs
from flows.errors import RunFailed
from flows.gpus import visible_gpus
from flows.selection import Selection, gaps
from flows.server import prefect_server
from pipeline.checks import check_models, notes
from pipeline.config import BuildConfig
from pipeline.extension import described, extend_root
from pipeline.root import checked_plan, create_root, plan_of

ALL = Selection()

log = logging.getLogger("semix.build")


class BuildFailed(RunFailed):
    """Some shards could not be made; everything else is committed."""


def build(
    config: BuildConfig, out: str, *, slots: int | None = None, selection: Selection = ALL
) -> Root:
    """Start or continue the mixed dataset of `config` at `out`.

    Args:
        slots: worker processes; by default one a visible GPU, or one.
        selection: which shards to make; all by default.
    Returns:
        The root, every wanted shard committed and an index written.
    Raises:
        InputError: the config or the place cannot be used; nothing was started.
        BuildFailed: names the shards that failed and the command to go on.
    """
    root = create_root(config, out)
    _say_notes(config)
    return resume(root, slots=slots, selection=selection)


def resume(
    root: Root, *, slots: int | None = None, selection: Selection = ALL, full: bool = False
) -> Root:
    """Continue a root from its store alone; arguments, result and errors as of `build`.

    What is damaged is put aside and made again: committed shards whose files are missing or cut,
    prototypes that cannot be read.

    Args:
        full: read every committed file first, not only its size.
    """
    _put_damage_aside(root, full=full)
    lacking = selection.wanted(root)
    if not lacking:
        return _finished(root, selection)
    if not root.store.shared:
        raise InputError("out", root.url, "worker processes cannot share memory; use a path")
    check_models(plan_of(root).config)
    whole = len(lacking) == root.plan["num_shards"]
    with prefect_server():
        from flows.build_flow import run_build  # Prefect costs seconds: only when there is work

        run_build(
            root,
            slots or len(visible_gpus()) or 1,
            shards="" if whole else format_ranges(lacking),
            allowed=selection.allowed(root),
        )
    return root


def extend(root: Root, groups_per_pair: int, *, slots: int | None = None) -> Root:
    """Add series behind the last, up to so many of each pair, and make them.

    Raises:
        InputError: there is nothing to add, or it cannot be added.
        BuildFailed: as of `build`; the extension stands, and `semix resume` goes on.
    """
    root = extend_root(root, groups_per_pair)
    log.info("%s: added %s", root.url, described(root.extensions[-1]))
    return resume(root, slots=slots)


def extend_to(config: BuildConfig, out: str, *, slots: int | None = None) -> Root:
    """Raise the series of each pair at `out` to what `config` says, which agrees otherwise.

    Raises:
        InputError, BuildFailed: as of `extend`.
    """
    root, wanted = Root(out), config.mixing.groups_per_pair
    planned = root.plan["config"]["mixing"]["groups_per_pair"]
    mixing = config.mixing.model_copy(update={"groups_per_pair": planned})
    create_root(config.model_copy(update={"mixing": mixing}), out)
    return extend(root, wanted, slots=slots)


def _finished(root: Root, selection: Selection) -> Root:
    """Nothing to make: pin what is there, unless more is missing than may be."""
    lacking, left_out = gaps(root, selection.shards, allowed=selection.allowed(root))
    if lacking and selection.skip_failed:
        raise BuildFailed(failure_message(root, lacking, []))
    say_left_out(root, left_out)
    what = "complete"
    if selection.retry_failed:
        what = "no missing shard has failed before"
    elif selection.shards:
        what = f"shards {format_ranges(sorted(selection.shards))}"
    log.info("%s: %s, nothing to do", root.url, what)
    root.write_index()
    return root


def say_left_out(root: Root, shards: list[int]) -> None:
    if shards:
        text = "%s: %d of %d shards failed and are left out: %s; the index is without them"
        total = root.plan["num_shards"]
        log.warning(text, root.url, len(shards), total, format_ranges(shards))


def _put_damage_aside(root: Root, *, full: bool) -> None:
    damage = root.verify(full=full)
    for problem in damage:
        log.warning("%s", problem)
    if count := put_aside(root, damage):
        log.warning("put %d damaged parts aside; making them again", count)


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

    Writes nothing. Other arguments as of `flows.costs.costs`.

    Raises:
        InputError: as `build`; besides, a share or rate out of range, too little space.
    """
    check_rates(share, rate)
    store = Store(out)
    if store.exists(PLAN):
        root = create_root(config, out)
        plan, missing = plan_of(root), len(root.missing())
    else:
        plan = checked_plan(config)
        missing = plan.num_shards
        store.check_writable(tidy=True)
    _say_notes(config)
    found = costs(plan, store, missing=missing, share=share, rate=rate, device=device, time=time)
    return {"out": store.url, "classes": len(plan.class_names), **found}


def _say_notes(config: BuildConfig) -> None:
    for note in notes(config):
        log.warning("%s", note)


def failure_message(root: Root, lacking: list[int], last_words: Iterable[str]) -> str:
    """Which shards are not made, why, and how to go on."""
    total = root.plan["num_shards"]
    text = [f"{len(lacking)} of {total} shards not made: {format_ranges(lacking)}"]
    failures = {shard: tries[-1] for shard, tries in root.failures().items() if shard in lacking}
    for shard, failure in list(failures.items())[:3]:
        text.append(f"shard {shard}: {failure['error']}: {failure['message']}")
    if failures:
        text.append(f"all reasons: semix failures {root.url}")
    text += last_words
    text.append(f"the rest is safe; go on with: semix resume {root.url}")
    return "\n".join(text)
