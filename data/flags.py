"""Flags of an audit: which series it found wanting, kept in the root for readers."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from data.root import Root
from data.schemas import MOST_INDEX, Group, Sha256
from data.strict_json import Strict, read_strictly

AUDITS = "audit"
# backwards, not_monotone: the weight against alpha; end_points: nearest prototype of another
# class; duplicate: a picture like one of an earlier series; still: neighbours that do not
# differ; degenerate: flat, black, white, or features that are no numbers.
Flag = Literal["backwards", "not_monotone", "end_points", "duplicate", "still", "degenerate"]
FLAGS: tuple[Flag, ...] = get_args(Flag)


def _all_named(flags: dict[Flag, list[int]]) -> dict[Flag, list[int]]:
    if set(flags) != set(FLAGS):
        raise ValueError(f"must name each of {', '.join(FLAGS)}")
    return flags


class SeriesFlags(Strict):
    """`audit/N.json`: group numbers by flag, ascending, for the series of one index.

    Attributes:
        index: name of the index that was audited.
        digest: its fingerprint, since a name alone says little once a root was copied.
        labels: digest of the label set that was audited; None for the labels in the shards.
    """

    index: str = Field(pattern=r"^index/[0-9]{1,9}\.json$")
    digest: Sha256
    labels: Sha256 | None
    flags: Annotated[dict[Flag, list[Group]], AfterValidator(_all_named)]


def store_flags(root: Root, found: SeriesFlags) -> str:
    """Write `audit/N.json`, create-only; the name of an equal one if there is one already."""
    for name, stored in _stored(root, found.index):
        if stored == found:
            return name
    number = len(_names(root))
    content = found.model_dump_json().encode()
    while not root.store.create(f"{AUDITS}/{number}.json", content):
        number += 1
    return f"{AUDITS}/{number}.json"


def newest_flags(root: Root, index: str) -> SeriesFlags | None:
    """What the last audit of an index found, with whatever labels.

    Raises:
        ValueError: an audit's file is damaged; named.
    """
    return next((flags for _, flags in _stored(root, index)), None)


def _stored(root: Root, index: str) -> Iterator[tuple[str, SeriesFlags]]:
    """All audits of an index, the newest first."""
    for name in reversed(_names(root)):
        content = root.store.get(name)
        try:
            values = read_strictly(SeriesFlags, content, what="audit", most=MOST_INDEX)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; remove it and run `semix audit` again") from None
        if values["index"] == index:
            yield name, SeriesFlags.model_validate(values)


def flagged_groups(flags: SeriesFlags, wanted: Iterable[Flag]) -> frozenset[int]:
    """Numbers of all groups that carry one of these flags."""
    by_flag: Mapping[Flag, list[int]] = flags.flags
    return frozenset(group for flag in wanted for group in by_flag[flag])


def _names(root: Root) -> list[str]:
    names = [name for name in root.store.list(AUDITS) if name.endswith(".json")]
    return sorted(names, key=lambda name: (len(name), name))  # 10 after 9
