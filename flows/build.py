"""Build or continue a mixed dataset: whatever its store lacks is made, then pinned by an index."""

import logging
from collections.abc import Collection, Iterable
from typing import Any

from data.errors import InputError
from data.ranges import format_ranges
from data.root import PLAN, Root
from data.store import Store
from flows.costs import SHARE, check_rates, costs
from flows.errors import RunFailed
from flows.gpus import visible_gpus
from flows.server import prefect_server
from pipeline.checks import check_models, notes
from pipeline.config import BuildConfig
from pipeline.root import checked_plan, create_root, plan_of

log = logging.getLogger("semix.build")


class BuildFailed(RunFailed):
    """Some shards could not be made; everything else is committed."""


def build(
    config: BuildConfig, out: str, *, slots: int | None = None, shards: Collection[int] = ()
) -> Root:
    """Start or continue the mixed dataset of `config` at `out`.

    Args:
        slots: worker processes; by default one a visible GPU, or one.
        shards: make only these; all by default.
    Returns:
        The root, every wanted shard committed and an index written.
    Raises:
        InputError: the config or the place cannot be used; nothing was started.
        BuildFailed: names the shards that failed and the command to go on.
    """
    root = create_root(config, out)
    _say_notes(config)
    return resume(root, slots=slots, shards=shards)


def resume(root: Root, *, slots: int | None = None, shards: Collection[int] = ()) -> Root:
    """Continue a root from its store alone; arguments, result and errors as of `build`.

    A committed shard whose files are missing or cut is made again.
    """
    for problem in root.verify():
        log.warning("%s; making it again", problem)
        root.discard(problem.shard)
    lacking = lacking_shards(root, shards)
    if not lacking:
        what = f"shards {format_ranges(sorted(shards))}" if shards else "complete"
        log.info("%s: %s, nothing to do", root.url, what)
        root.write_index()
        return root
    if not root.store.local:
        raise InputError("out", root.url, "worker processes cannot share memory; use a path")
    check_models(plan_of(root).config)
    with prefect_server():
        from flows.build_flow import run_build  # Prefect costs seconds: only when there is work

        run_build(root, slots or len(visible_gpus()) or 1, shards=format_ranges(sorted(shards)))
    return root


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


def lacking_shards(root: Root, shards: Collection[int] = ()) -> list[int]:
    """Missing shards, of `shards` if any are named. Raises InputError for one not in the plan."""
    outside = sorted(set(shards) - set(range(root.plan["num_shards"])))
    if outside:
        last = root.plan["num_shards"] - 1
        raise InputError("shards", format_ranges(outside), f"this root has shards 0 to {last}")
    return [shard for shard in root.missing() if not shards or shard in shards]


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
