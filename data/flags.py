"""Flags that people set: series that they excluded, which a training can leave out.

Each change is a further create-only file, `flags/N.json`. Two people who exclude series at the same
time lose neither flag, and whoever takes a flag back adds a file, so that a run's flags stay known.
"""

import re
import time
from collections.abc import Collection
from dataclasses import dataclass

from semix.data.errors import InputError
from semix.data.formats import EXCLUSIONS, ExclusionFlags
from semix.data.root import Root

FLAGS_FILE = re.compile(rf"{EXCLUSIONS}/(\d{{1,9}})\.json")
EXCLUDED = "excluded"  # name of the flag, beside those of audits
REMEDY = "restore it from a copy: which series are excluded depends on every file of flags"


class DamagedFlags(InputError):
    """A file of flags is missing, damaged or of another plan."""


@dataclass(frozen=True)
class ExcludedSeries:
    """The series that the first `count` files of flags exclude.

    Attributes:
        groups: their numbers.
    """

    count: int = 0
    groups: frozenset[int] = frozenset()


def read_excluded(
    root: Root, *, count: int | None = None, after: ExcludedSeries | None = None
) -> ExcludedSeries:
    """The series that are excluded.

    Args:
        count: read this number of files, as a run pinned them; None reads all.
        after: the result of an earlier call, whose files are not read again.
    Raises:
        DamagedFlags: a file is missing, damaged, or of another plan.
        InputError: a newer version of semix wrote a file.
    """
    after = after or ExcludedSeries()
    count = _count(root) if count is None else count
    names = [flags_name(number) for number in range(after.count, count)]
    contents = root.store.get_many(names, max_bytes=ExclusionFlags.MAX_BYTES)
    groups = set(after.groups)
    for name in names:
        location = f"{root.url}/{name}"
        if name not in contents:
            raise DamagedFlags(location, "missing or too large", REMEDY)
        flags = _parse(contents[name], root, location)
        groups = (groups | set(flags.excluded)) - set(flags.restored)
    return ExcludedSeries(max(count, after.count), frozenset(groups))


def flag_series(
    root: Root, *, excluded: Collection[int] = (), restored: Collection[int] = ()
) -> str:
    """Write `flags/N.json`, create-only, under the next free number; returns its name.

    Raises:
        InputError: no such series, or one that is both excluded and restored.
        OSError: the root cannot be written.
    """
    groups = root.plan.num_groups
    for group in (*excluded, *restored):
        if not 0 <= group < groups:
            raise InputError("group", group, f"{root.url} has groups 0 to {groups - 1}")
    if both := set(excluded) & set(restored):
        raise InputError("group", min(both), "is both excluded and restored; choose one")
    content = ExclusionFlags(
        plan=root.plan.digest,
        excluded=sorted(set(excluded)),
        restored=sorted(set(restored)),
        time=time.time(),
    ).written()
    number = _count(root)
    while not root.store.create(flags_name(number), content):
        number += 1
    return flags_name(number)


def flags_name(number: int) -> str:
    return f"{EXCLUSIONS}/{number}.json"


def _count(root: Root) -> int:
    """The number after that of the last file; files are read by number, not by listing."""
    names = root.store.scan(EXCLUSIONS, suffix=".json")[0]
    matches = (FLAGS_FILE.fullmatch(name) for name in names)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _parse(content: bytes, root: Root, location: str) -> ExclusionFlags:
    try:
        flags = ExclusionFlags.read(content, where=location)
        if flags.plan != root.plan.digest:
            raise ValueError("belongs to another plan")
    except ValueError as error:
        raise DamagedFlags(location, "damaged", f"{error}; {REMEDY}") from None
    return flags
