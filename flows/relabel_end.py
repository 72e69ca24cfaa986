"""How relabelling ends: what there is now, or the shards that have no labels and why."""

from collections.abc import Sequence
from typing import Any

from data.label_sets import LabelSet
from data.root import Root
from flows.errors import RunFailed
from flows.shard_words import few_ranges, reasons


class RelabelFailed(RunFailed):
    """Some shards could not be labelled or baked; everything else is committed."""


def facts_of(root: Root, sets: Sequence[LabelSet], *, out: str = "") -> dict[str, Any]:
    """What `semix relabel` shows, as plain values."""
    facts: dict[str, Any] = {"url": root.url, "digest": None}
    if sets:
        facts |= sets[-1].status()
    if out:
        target = Root(out)
        facts |= {"out": target.url, "baked": len(target.done())}
    return facts


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
