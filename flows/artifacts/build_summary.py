"""A build in one table: shards, images, seconds by stage, rate, failures with their reasons."""

from itertools import islice

from data.printable import markdown_text
from data.root import Progress, Root
from flows.artifacts.facts_table import facts_table
from flows.artifacts.publishing import only_shown
from flows.progress import duration, standing

MOST_FAILURES = 20  # of rows; `semix failures` has them all


def build_summary(root: Root, *, key: str, began: Progress, seconds: float) -> None:
    """Show what there is after a run.

    Args:
        began: the progress when the run began.
        seconds: that it took.
    """
    with only_shown():
        facts = summary(root.progress(), began=began, seconds=seconds) | _failures(root)
        place = markdown_text(root.url)
        text = f"What is at {place}; the rate of one worker leaves out loading models."
        facts_table(facts, key=f"{key}-summary", description=text)


def summary(found: Progress, *, began: Progress, seconds: float) -> dict[str, str]:
    """Counts, rates and seconds by stage."""
    made = found.images_done - began.images_done
    one = standing(found)["images_per_second"]
    facts = {
        "shards": f"{found.done} of {found.shards}, {found.done - began.done} in this run",
        "images": f"{found.images_done} of {found.images}, {made} in this run",
        "this run": f"{duration(seconds)}, {made / seconds:.3g} images/s",
        "one worker": f"{one:.3g} images/s" if one else "",
    }
    if found.left_out:
        facts["left out"] = f"{found.left_out} series"
    stages = sorted(found.stages.items(), key=lambda stage: -stage[1])
    return facts | {f"stage {name}": f"{taken:.1f} s of workers" for name, taken in stages}


def _failures(root: Root) -> dict[str, str]:
    """The last reason of each shard that is not made."""
    failures = root.failures()
    facts = {
        f"shard {shard} failed": f"{tries[-1].error}: {tries[-1].message}"
        for shard, tries in islice(failures.items(), MOST_FAILURES)
    }
    if left := len(failures) - len(facts):
        facts[f"{left} more failed"] = f"semix failures {root.url}"
    return facts
