"""How a build ends: with an index, or with the shards that are missing and why."""

import logging
from collections.abc import Collection, Iterable

from data.ranges import format_ranges
from data.root import Root
from flows.errors import RunFailed
from flows.selection import Selection, gaps
from flows.shard_words import few_ranges, reasons

log = logging.getLogger("semix.build")


class BuildFailed(RunFailed):
    """Some shards could not be made; everything else is committed."""


def refuse_gaps(root: Root, selection: Selection, last_words: Iterable[str] = ()) -> None:
    """Raises BuildFailed if a wanted shard is missing, whatever the workers said.

    Args:
        last_words: of workers that ended with an error.
    """
    lacking, left_out = gaps(root, selection.shards, allowed=selection.allowed(root))
    if selection.retry_failed:  # what never failed was not asked for
        lacking = sorted(root.failed_attempts(lacking))
    if lacking:
        raise BuildFailed(failure_message(root, lacking, last_words))
    if left_out:
        text = "%s: %d of %d shards failed and are left out: %s; the index is without them"
        total = root.plan.num_shards
        log.warning(text, root.url, len(left_out), total, few_ranges(left_out))


def say_complete(root: Root, selection: Selection) -> None:
    """There is nothing to make of what was asked for."""
    what = "complete"
    if selection.retry_failed:
        what = "no missing shard has failed before"
    elif selection.shards:
        what = f"shards {format_ranges(sorted(selection.shards))}"
    log.info("%s: %s, nothing to do", root.url, what)


def failure_message(root: Root, lacking: Collection[int], last_words: Iterable[str]) -> str:
    """Which shards are not made, why, and how to go on."""
    total = root.plan.num_shards
    text = [f"{len(lacking)} of {total} shards not made: {few_ranges(lacking)}"]
    if why := reasons(root.failures(), lacking):
        text += [*why, f"all reasons: semix failures {root.url}"]
    text += last_words
    text.append(f"the rest is safe; go on with: semix resume {root.url}")
    return "\n".join(text)
