"""The steps of a build around its slots: which shards it makes, how it begins, how it ends."""

import logging
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from semix.data.errors import InputError
from semix.data.formats import PAIRS, PROTOTYPES
from semix.data.imagefolder import FolderReport, inspect_folder
from semix.data.ranges import format_ranges
from semix.data.root import Root, ShardInput
from semix.data.splits import RealDataConfig
from semix.data.verify import damage, quarantine
from semix.flows.configs import load_config
from semix.flows.costs import check_space
from semix.flows.failures import RunFailed, few_ranges, reasons
from semix.flows.progress import counting
from semix.flows.slots import SlotSettings, check_slots
from semix.pipeline.checks import check_models, notes
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan
from semix.pipeline.prototypes import prepare
from semix.pipeline.provenance import planned_models
from semix.pipeline.root import config_of, create_root, open_root

log = logging.getLogger("semix.build")


class BuildFailed(RunFailed):
    """Some shards could not be made; everything else is committed."""


@dataclass(frozen=True)
class Selection:
    """What is asked of a run.

    Attributes:
        shards: only these; all if empty.
        retry_failed: only what failed before and is still missing.
        skip_failed: leave that out instead, and end well without it if it is at most this many
            shards, as `5`, or this share of all, as `1%`; empty to leave nothing out.
    Raises:
        InputError: both at once, or a limit that is neither.
    """

    shards: Collection[int] = frozenset()
    retry_failed: bool = False
    skip_failed: str = ""

    def __post_init__(self) -> None:
        if self.retry_failed and self.skip_failed:
            remedy = "failed shards are either tried again or left out; drop one of the two"
            raise InputError("--retry-failed", f"with --skip-failed {self.skip_failed}", remedy)
        if self.skip_failed:
            most_failed(self.skip_failed, 1)

    def allowed(self, root: Root) -> int | None:
        """How many shards of this root may fail; None if it shall be complete."""
        return most_failed(self.skip_failed, root.plan.num_shards) if self.skip_failed else None

    def wanted(self, root: Root) -> list[int]:
        """The missing shards that this run shall try."""
        lacking = lacking_shards(root, self.shards)
        if not (self.retry_failed or self.skip_failed):
            return lacking
        failed = root.failed_attempts(lacking)
        return [shard for shard in lacking if (shard in failed) == self.retry_failed]


ALL = Selection()


def most_failed(limit: str, total: int) -> int:
    """`5` or `1%` of `total` as a number of shards, rounded down. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", limit.strip())
    if not match or (not match[2] and "." in match[1]) or (match[2] and float(match[1]) > 100):
        raise InputError("skip-failed", limit, "give a number of shards, as 5, or a share, as 1%")
    return math.floor(float(match[1]) * total / 100) if match[2] else int(match[1])


def lacking_shards(root: Root, shards: Collection[int] = ()) -> list[int]:
    """Missing shards, of `shards` if any are named. Raises InputError for one not in the plan."""
    total = root.plan.num_shards
    if not shards:
        return root.missing()
    outside = [shard for shard in shards if shard >= total]
    if outside:
        raise InputError("shards", format_ranges(outside), f"this root has shards 0 to {total - 1}")
    wanted = frozenset(shards)
    return [shard for shard in root.missing() if shard in wanted]


def gaps(
    root: Root, shards: Collection[int], *, allowed: int | None
) -> tuple[list[int], list[int]]:
    """What is wrongly missing after a run, and what may be.

    Args:
        shards: those that were asked for; all if empty.
        allowed: how many of all shards may have failed; None if none was to be left out.
    Returns:
        the shards that make the run a failure, and those that failed and were left out.
    """
    lacking = lacking_shards(root, shards)
    if allowed is None:
        return lacking, []
    failed = root.failed_attempts()
    if len(failed) <= allowed and failed.keys() >= set(lacking):
        return [], sorted(failed)
    return sorted({*lacking, *failed}), []


def opened(out: str, config: str, overrides: Sequence[str]) -> Root:
    """The root that a run works on: of a config file, begun where it is new; else as it is there.

    Raises:
        InputError: no root and no config, or one that cannot be used, or of another root.
    """
    if config:
        return create_root(load_config(BuildConfig, config, overrides), out)
    return open_root(out, overrides)


def put_damage_aside(root: Root, *, full: bool = False) -> None:
    """Make damaged parts missing. `full` reads every file; else sizes are compared."""
    found = damage(root, full=full)
    for problem in found:
        log.warning("%s", problem)
    if count := quarantine(root, found):
        log.warning("put %d damaged parts aside; making them again", count)


def restore(root: Root, device: str) -> None:
    """Measure and draw again what committed shards were made with, where it is gone.

    Workers do so before they make a shard; this is for a root that lacks none.

    Raises:
        InputError: it cannot be measured here, or comes out otherwise than the shards say.
    """
    files: dict[ShardInput, str] = {"prototypes": PROTOTYPES, "pairs": PAIRS}
    named = [name for kind, name in files.items() if any(root.made_with(kind))]
    if not all(map(root.store.exists, named)):
        prepare(root, device=device)


def check_work(root: Root, slots: SlotSettings, selection: Selection = ALL) -> None:
    """Raises InputError for what would keep every slot from working."""
    check_slots(slots)
    if not root.store.shared:
        raise InputError("out", root.url, "worker processes cannot share memory; use a path")
    config = config_of(root)
    try:
        check_models(config)
    except InputError as error:
        moved = f"semix resume {root.url} --set {error.field}=PLACE"
        remedy = f"{error.remedy}; if it lies elsewhere now: {moved}"
        raise InputError(error.field, error.value, remedy) from None
    # Without pairs, which change no size: damaged ones are drawn again.
    written = root.plan
    plan = BuildPlan(
        config,
        tuple(written.class_names),
        models=planned_models(written),
        extensions=root.extensions,
    )
    check_space(plan, root.store, missing=len(selection.wanted(root)))


def survey_images(config: RealDataConfig) -> FolderReport:
    """Decode all pictures of a folder, under a bar. Raises InputError for what cannot be used."""
    with counting("decoding real images") as show:
        return inspect_folder(config, show)


def say_what_is_ignored(config: RealDataConfig) -> None:
    """As `survey_images`, with a line for the pictures and one for whatever else lies there."""
    surveyed = survey_images(config)
    log.info("%d real images can be decoded", surveyed.images - len(surveyed.bad))
    for note in surveyed.notes():
        log.warning("%s", note)


def say_notes(config: BuildConfig) -> None:
    for note in notes(config):
        log.warning("%s", note)


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


def kept(root: Root) -> str:
    """What is safe of a run that was lost, and the command that goes on."""
    done, total = len(root.done()), root.plan.num_shards
    return f"{done} of {total} shards are committed; go on with: semix resume {root.url}"


def failure_message(root: Root, lacking: Collection[int], last_words: Iterable[str]) -> str:
    """Which shards are not made, why, and how to go on."""
    total = root.plan.num_shards
    text = [f"{len(lacking)} of {total} shards not made: {few_ranges(lacking)}"]
    if why := reasons(root.failures(), lacking):
        text += [*why, f"all reasons: semix failures {root.url}"]
    text += last_words
    text.append(f"the rest is safe; go on with: semix resume {root.url}")
    return "\n".join(text)
