"""Rules and audit flags for series that are left out while reading; none are deleted."""

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import Field

from semix.data.flags import EXCLUDED, read_excluded
from semix.data.formats import AUDITS, SeriesFlags
from semix.data.root import Root
from semix.data.settings import Settings

AUDIT = re.compile(rf"{AUDITS}/\d{{1,9}}\.json")


class Exclusion(Settings):
    """Rules for series to leave out while reading; all are off by default."""

    min_correlation: float | None = Field(
        None,
        ge=-1,
        le=1,
        description="leave out pairs' series whose Spearman correlation of alpha and weight is "
        "lower; 0 leaves out those that run backwards",
    )
    monotone: bool = Field(
        False, description="leave out pairs' series whose weight falls somewhere along alpha"
    )
    end_points: bool = Field(
        False,
        description="leave out series with an unmixed image whose stored CLIP features are "
        "nearest to the prototype of another class",
    )
    max_disagreement: float | None = Field(
        None,
        ge=0,
        description="leave out series with an image whose labels by the two encoders differ more, "
        "in total variation from 0 to 1",
    )
    min_stability: float | None = Field(
        None, ge=-1, le=1, description="leave out series whose noise is less stable"
    )
    flagged: tuple[Literal["duplicate", "still", "degenerate", "concept", "excluded"], ...] = Field(
        (),
        description="leave out series with these flags of `semix audit`; `excluded` are those that "
        "were excluded in `semix browse`",
    )

    @property
    def reads_flags(self) -> bool:
        """Whether series that people excluded are left out."""
        return EXCLUDED in self.flagged

    @property
    def audit_flags(self) -> tuple[str, ...]:
        """The flags of audits among those to leave out."""
        return tuple(flag for flag in self.flagged if flag != EXCLUDED)

    def rules(self) -> dict[str, object]:
        """The rules that are on, by name."""
        off = Exclusion().model_dump()
        return {name: value for name, value in self.model_dump().items() if value != off[name]}


def store_flags(root: Root, flags: SeriesFlags) -> str:
    """Write `audit/N.json`, create-only; returns its name, or that of an equal file."""
    for name, stored in _stored(root, flags.index):
        if stored == flags:
            return name
    names = _names(root)
    number = 1 + _number(names[-1]) if names else 0
    while not root.store.create(f"{AUDITS}/{number}.json", flags.written()):
        number += 1
    return f"{AUDITS}/{number}.json"


def newest_flags(root: Root, index: str) -> SeriesFlags | None:
    """The flags of the last audit of an index, whichever label set was audited.

    Raises:
        ValueError: the file of an audit is damaged; the message names it.
    """
    return next((flags for _, flags in _stored(root, index)), None)


def flags_of(root: Root, group: int) -> list[str]:
    """The flags of a series: by the last audit of the newest index, and EXCLUDED.

    Raises:
        ValueError: the file of the audit is damaged; the message names it.
        InputError: a file of flags is damaged.
    """
    names = root.indices()
    audit = newest_flags(root, names[-1]) if names else None
    flags = [flag for flag, groups in audit.flags.items() if group in groups] if audit else []
    return flags + [EXCLUDED] * (group in read_excluded(root).groups)


def flagged_groups(flags: SeriesFlags, names: Iterable[str]) -> frozenset[int]:
    """Numbers of all groups with one of these flags. Raises KeyError: a flag was not audited."""
    return frozenset(group for flag in names for group in flags.flags[flag])


def _stored(root: Root, index: str) -> Iterator[tuple[str, SeriesFlags]]:
    """All audits of an index, the newest first."""
    for name in reversed(_names(root)):
        content = root.store.get(name, max_bytes=SeriesFlags.MAX_BYTES)
        try:
            flags = SeriesFlags.read(content, where=f"{root.url}/{name}")
        except ValueError as error:
            raise ValueError(f"{name}: {error}; remove it and run `semix audit` again") from None
        if flags.index == index:
            yield name, flags


def _names(root: Root) -> list[str]:
    """Names of the audits, oldest first."""
    return sorted(filter(AUDIT.fullmatch, root.store.list(AUDITS)), key=_number)


def _number(name: str) -> int:
    return int(name.removeprefix(f"{AUDITS}/").removesuffix(".json"))
