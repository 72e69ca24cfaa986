"""Bake labels into a root of their own, beside the images they belong to."""

from collections.abc import Callable, Sequence

from data.label_sets import LabelSet
from data.root import Progress, Root
from data.threads import mapped
from flows.progress import now_and_then, shown
from flows.relabel_end import RelabelFailed
from flows.shard_words import few_ranges
from pipeline.bake import bake_shard, open_baked
from pipeline.config import BuildConfig
from pipeline.plan import BuildPlan
from pipeline.root import plan_of
from pipeline.work import failure_of

THREADS = 4  # shards at a time; each holds one series in memory


def opened(root: Root, config: BuildConfig, sets: Sequence[LabelSet], out: str) -> Root:
    """The new root, begun where it is new.

    Args:
        sets: the last one's labels are baked; the root's own if there is none.
    Raises:
        InputError: the place cannot be used.
    """
    return open_baked(root, config, sets[-1] if sets else None, out)


def to_bake(root: Root, sets: Sequence[LabelSet], target: Root) -> list[int]:
    """Labelled shards that the new root lacks."""
    done = target.done()
    return [shard for shard in (sets[-1] if sets else root).done() if shard not in done]


def bake(
    root: Root, sets: Sequence[LabelSet], target: Root, *listeners: Callable[[Progress], None]
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
        for shard, reason in zip(todo, mapped(work, todo, threads=THREADS), strict=True):
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
