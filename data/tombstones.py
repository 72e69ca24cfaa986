"""Tombstones: how often shards were discarded, `discarded/0012/0012345.N.json`."""

import re

from data.schemas import PER_FOLDER
from data.store import Store

FOLDER = "discarded"
NAME = re.compile(r"discarded/\d{4}/(\d{7})\.(\d+)\.json")


def discards(store: Store, folder: int) -> dict[int, int]:
    """Of the shards of one folder that ever were: the number of the last tombstone."""
    found: dict[int, int] = {}
    for name in store.scan(f"{FOLDER}/{folder:04d}", suffix=".json")[0]:
        if match := NAME.fullmatch(name):
            number = int(match[1])
            found[number] = max(found.get(number, 0), int(match[2]))
    return found


def discards_of(store: Store, shard: int) -> int:
    return discards(store, shard // PER_FOLDER).get(shard, 0)


def numbered_folders(store: Store, parent: str) -> set[int]:
    """The folders of a thousand shards that are below this one."""
    found = (re.fullmatch(rf"{parent}/(\d{{4}})", name) for name in store.scan(parent)[1])
    return {int(match[1]) for match in found if match}
