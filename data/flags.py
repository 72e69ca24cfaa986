"""Flags of an audit: which series it found wanting, kept in the root for readers."""

from collections.abc import Iterable, Iterator

from data.formats import AUDITS, SeriesFlags
from data.root import Root


def store_flags(root: Root, found: SeriesFlags) -> str:
    """Write `audit/N.json`, create-only; the name of an equal one if there is one already."""
    for name, stored in _stored(root, found.index):
        if stored == found:
            return name
    number = len(_names(root))
    while not root.store.create(f"{AUDITS}/{number}.json", found.written()):
        number += 1
    return f"{AUDITS}/{number}.json"


def newest_flags(root: Root, index: str) -> SeriesFlags | None:
    """What the last audit of an index found, with whatever labels.

    Raises:
        ValueError: an audit's file is damaged; named.
    """
    return next((flags for _, flags in _stored(root, index)), None)


def flagged_groups(flags: SeriesFlags, wanted: Iterable[str]) -> frozenset[int]:
    """Numbers of all groups that carry one of these flags. Raises KeyError: it looked for none."""
    return frozenset(group for flag in wanted for group in flags.flags[flag])


def _stored(root: Root, index: str) -> Iterator[tuple[str, SeriesFlags]]:
    """All audits of an index, the newest first."""
    for name in reversed(_names(root)):
        try:
            flags = SeriesFlags.read(root.store.get(name), where=f"{root.url}/{name}")
        except ValueError as error:
            raise ValueError(f"{name}: {error}; remove it and run `semix audit` again") from None
        if flags.index == index:
            yield name, flags


def _names(root: Root) -> list[str]:
    names = [name for name in root.store.list(AUDITS) if name.endswith(".json")]
    return sorted(names, key=lambda name: (len(name), name))  # 10 after 9
