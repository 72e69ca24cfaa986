"""Indices that cannot be relied on, and files that nothing refers to."""

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from data.records import RECORD, index_names, open_index
from data.store import Fact
from data.verification.problem import Problem

if TYPE_CHECKING:
    from data.root import Root

OURS = re.compile(r"shards/\d{4}/(\d{7})-[0-9a-f]{8}\.(tar|features\.safetensors)")


def index_problems(root: "Root", facts: dict[str, Fact]) -> Iterator[Problem]:
    """Indices that cannot be read, or that pin what is no longer as it was."""
    for name in index_names(root.store):
        try:
            index = open_index(root.store, name, plan_digest=root.plan["digest"])
        except (OSError, ValueError) as error:
            yield Problem(None, str(error), "index", (name,))
            continue
        changed = [s for s in index["shards"] if _size(facts, s["tar"]) != s["bytes"]]
        if changed:
            text = f"{name}: pins {len(changed)} tars that are gone or cut, {changed[0]['tar']} on"
            yield Problem(changed[0]["shard"], text, "index")


def stray_files(facts: dict[str, Fact], referred: Collection[str]) -> Iterator[Problem]:
    """Files beside the shards that no commit record names."""
    for name, fact in facts.items():
        if RECORD.match(name) or name in referred:
            continue
        match = OURS.fullmatch(name)
        what = "no commit record names it" if match else "does not belong here"
        text = f"{name}: {what} ({fact.bytes} bytes)"
        yield Problem(int(match[1]) if match else None, text, "orphan")


def _size(facts: dict[str, Fact], name: str) -> int | None:
    return facts[name].bytes if name in facts else None
