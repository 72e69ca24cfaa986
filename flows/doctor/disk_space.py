"""Free space where a build writes, and for files on their way, against the estimate."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from data.errors import InputError
from data.store import Store
from flows.costs import amount, free_bytes, refuse_small_place
from flows.doctor.finding import FAILED, OK, UNCHECKED, WARNING, Finding
from flows.doctor.subject import Subject

LEAST = 1e9  # bytes free, where nothing is known of what is to come


def check(subject: Subject) -> Iterator[Finding]:
    needed, shard = _estimate(subject)
    yield _temporary(shard)
    if not subject.out:
        yield Finding("disk", UNCHECKED, "no place was given; --out URL")
        return
    store = Store(subject.out)
    free = free_bytes(store)
    if free is None:
        yield Finding("disk", OK, f"{store.url} has no limit that could be asked for")
        return
    if needed is not None:
        refuse_small_place(store, needed, free)
    least = LEAST if needed is None else needed
    short = free < least
    known = "" if needed is None else f", the build takes about {amount(needed)}"
    remedy = "free some, or choose another place" if short else ""
    yield Finding("disk", WARNING if short else OK, f"{amount(free)} free{known}", remedy)


def _estimate(subject: Subject) -> tuple[float | None, float | None]:
    """Bytes of what is missing of a build, and of one shard; None if not known."""
    if subject.build is None:
        return None, None
    from pipeline.checks import check_models
    from pipeline.estimate import estimate
    from pipeline.plan import BuildPlan

    try:
        check_models(subject.build)
    except InputError:  # what is wrong with them is said with the models
        return None, None
    plan = BuildPlan(subject.build)
    found = estimate(plan)
    if found.bytes is None:
        return None, None
    shard = found.bytes / plan.num_shards
    done = _committed(subject.out)
    return shard * max(0, plan.num_shards - done), shard


def _committed(out: str) -> int:
    """Shards that are there already."""
    from data.formats import PLAN
    from data.root import Root

    return Root(out).progress().done if out and Store(out).exists(PLAN) else 0


def _temporary(shard: float | None) -> Finding:
    folder = Path(tempfile.gettempdir())
    free, needed = shutil.disk_usage(folder).free, max(LEAST, 4 * (shard or 0))
    found = f"{folder}: {amount(free)} free"
    if free < (shard or 0):
        remedy = f"one shard takes {amount(shard or 0)}; set TMPDIR to a larger place"
        return Finding("temporary files", FAILED, found, remedy)
    remedy = "set TMPDIR to a larger place" if free < needed else ""
    return Finding("temporary files", WARNING if remedy else OK, found, remedy)
