"""The steps of a build before and after its slots: select shards, check, quarantine, report."""

import logging
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES
from semix.data.imagefolder import FolderReport, inspect_folder
from semix.data.ranges import format_ranges
from semix.data.records import Problem
from semix.data.root import DamagedShards, Root
from semix.data.splits import RealDataConfig
from semix.data.verify import damage, quarantine, quarantine_prototypes
from semix.flows.configs import load_config
from semix.flows.costs import check_space
from semix.flows.failures import RunFailed, few_ranges, reasons
from semix.flows.progress import count_display
from semix.flows.series_by_run import start_build
from semix.pipeline.checks import check_models, notes
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import Build, build_of, open_build
from semix.pipeline.prototypes import prepare

log = logging.getLogger("semix.build")


class BuildFailed(RunFailed):
    """Some shards could not be made; everything else is committed."""


@dataclass(frozen=True)
class ShardSelection:
    """Which shards a run makes.

    Attributes:
        shards: only these; all if empty.
        retry_failed: only missing shards that failed before.
        skip_failed: leave the failed shards out, and succeed if they are at most this many, as `5`,
            or this percentage of all shards, as `1%`; empty to leave none out.
    Raises:
        InputError: both options at once, or a limit that is no number or percentage.
    """

    shards: Collection[int] = frozenset()
    retry_failed: bool = False
    skip_failed: str = ""

    def __post_init__(self) -> None:
        if self.retry_failed and self.skip_failed:
            remedy = "failed shards are either tried again or left out; drop one of the two"
            raise InputError("--retry-failed", f"with --skip-failed {self.skip_failed}", remedy)
        if self.skip_failed:
            failure_limit(self.skip_failed, 1)

    def allowed_failures(self, root: Root) -> int | None:
        """How many shards of this root may fail; None if it must be complete."""
        return failure_limit(self.skip_failed, root.plan.num_shards) if self.skip_failed else None

    def shards_to_make(self, root: Root) -> list[int]:
        """The missing shards that this run tries to make."""
        missing = missing_shards(root, self.shards)
        if not (self.retry_failed or self.skip_failed):
            return missing
        failed = root.failed_attempts(missing)
        return [shard for shard in missing if (shard in failed) == self.retry_failed]


ALL_SHARDS = ShardSelection()


def failure_limit(limit: str, total: int) -> int:
    """`5` or `1%` of `total` as a number of shards, rounded down. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", limit.strip())
    if not match or (not match[2] and "." in match[1]) or (match[2] and float(match[1]) > 100):
        raise InputError("skip-failed", limit, "give a number of shards (5) or a percentage (1%)")
    return math.floor(float(match[1]) * total / 100) if match[2] else int(match[1])


def missing_shards(root: Root, shards: Collection[int] = ()) -> list[int]:
    """Missing shards, among `shards` unless empty. Raises InputError for one not in the plan."""
    total = root.plan.num_shards
    if not shards:
        return root.missing()
    extra = [shard for shard in shards if shard >= total]
    if extra:
        raise InputError("shards", format_ranges(extra), f"this root has shards 0 to {total - 1}")
    selected = frozenset(shards)
    return [shard for shard in root.missing() if shard in selected]


def gaps(
    root: Root, shards: Collection[int], *, allowed_failures: int | None
) -> tuple[list[int], list[int]]:
    """Missing shards after a run: those that fail it, and those that may be left out.

    Args:
        shards: the selected shards; all if empty.
        allowed_failures: how many of all shards may have failed; None if none may be left out.
    """
    missing = missing_shards(root, shards)
    if allowed_failures is None:
        return missing, []
    failed = root.failed_attempts()
    if len(failed) <= allowed_failures and failed.keys() >= set(missing):
        return [], sorted(failed)
    return sorted({*missing, *failed}), []


def open_or_create(out: str, config: str, overrides: Sequence[str], *, device: str) -> Build:
    """The build of a config, started if it is new; without a config, of the existing root.

    Raises:
        InputError: neither root nor config, or a config that cannot be used or is another root's.
    """
    if config:
        return start_build(load_config(BuildConfig, config, overrides), out, device=device)
    return open_build(out, overrides)


def quarantine_damage(root: Root) -> None:
    """Read every file, and move damaged ones away, so that they count as missing."""
    _quarantine(root, damage(root, full=True))


def index_or_quarantine(root: Root) -> str | None:
    """Write the index of a root; returns its name.

    Returns None if shards were damaged: then these are moved away, so that they count as missing.
    """
    try:
        return root.write_index()
    except DamagedShards as error:
        _quarantine(root, error.problems)
        return None


def _quarantine(root: Root, problems: Sequence[Problem]) -> None:
    for problem in problems:
        log.warning("%s", problem)
    if count := quarantine(root, problems):
        log.warning("quarantined %d damaged shards or files; making them again", count)


def restore_prototypes(root: Root, overrides: Sequence[str], device: str) -> None:
    """Measure lost or damaged prototypes again, if shards were made with them.

    Workers do this before they make a shard; this is for a root without missing shards.

    Raises:
        InputError: they cannot be measured here, or differ from those that shards were made with.
    """
    quarantine_prototypes(root)
    if not root.store.exists(PROTOTYPES) and root.made_with():
        log.warning("%s is missing; it is measured again", PROTOTYPES)
        prepare(build_of(root, overrides), device=device)


def check_work(build: Build, selection: ShardSelection = ALL_SHARDS) -> None:
    """Raise InputError for anything that would fail in every slot."""
    root = build.root
    if not root.store.shared:
        raise InputError("out", root.url, "worker processes cannot share memory; use a path")
    try:
        check_models(build.config)
    except InputError as error:
        command = f"semix resume {root.url} --set {error.field}=PATH"
        remedy = f"{error.remedy}; if it was moved: {command}"
        raise InputError(error.field, error.value, remedy) from None
    check_space(build.plan, root.store, missing=len(selection.shards_to_make(root)))


def decode_all_images(config: RealDataConfig) -> FolderReport:
    """Decode all images of a folder, with a progress bar. Raises InputError for bad images."""
    with count_display("decoding real images") as show:
        return inspect_folder(config, show)


def log_ignored_files(config: RealDataConfig) -> None:
    """Decode all images of a folder; log their number and the files that are ignored."""
    folder_report = decode_all_images(config)
    log.info("%d real images can be decoded", folder_report.images - len(folder_report.bad))
    for note in folder_report.notes():
        log.warning("%s", note)


def log_notes(config: BuildConfig) -> None:
    for note in notes(config):
        log.warning("%s", note)


def check_complete(
    root: Root, selection: ShardSelection, worker_errors: Iterable[str] = ()
) -> None:
    """Raise BuildFailed if a selected shard is missing, whatever the workers reported.

    Args:
        worker_errors: last lines of workers that ended with an error.
    """
    missing, left_out = gaps(
        root, selection.shards, allowed_failures=selection.allowed_failures(root)
    )
    if selection.retry_failed:  # shards that never failed were not selected
        missing = sorted(root.failed_attempts(missing))
    if missing:
        raise BuildFailed(failure_message(root, missing, worker_errors))
    if left_out:
        text = "%s: %d of %d shards failed and are left out: %s; the index is without them"
        total = root.plan.num_shards
        log.warning(text, root.url, len(left_out), total, few_ranges(left_out))


def log_complete(root: Root, selection: ShardSelection) -> None:
    """Log that none of the selected shards has to be made."""
    status = "complete"
    if selection.retry_failed:
        status = "no missing shard has failed before"
    elif selection.shards:
        status = f"shards {format_ranges(sorted(selection.shards))}"
    log.info("%s: %s, nothing to do", root.url, status)


def resume_hint(root: Root) -> str:
    """How much of a lost run is committed, and the command that goes on."""
    done, total = len(root.done()), root.plan.num_shards
    return f"{done} of {total} shards are committed; go on with: semix resume {root.url}"


def failure_message(root: Root, missing: Collection[int], worker_errors: Iterable[str]) -> str:
    """The shards that were not made, the reasons, and how to go on."""
    total = root.plan.num_shards
    lines = [f"{len(missing)} of {total} shards not made: {few_ranges(missing)}"]
    if failure_reasons := reasons(root.failures(), missing):
        lines += [*failure_reasons, f"all reasons: semix failures {root.url}"]
    lines += worker_errors
    lines.append(f"all other shards are safe; go on with: semix resume {root.url}")
    return "\n".join(lines)
