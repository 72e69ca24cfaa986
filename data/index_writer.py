"""Write an index: only the parts of folders that changed, then the file that names them."""

from data.commit_records import Record
from data.fingerprint import canonical_json
from data.indices import PARTS, index_names, make_part, newest_index, part_name
from data.records import Records
from data.store import Store


def write_index(store: Store, records: Records, *, plan: str, shards: int) -> str:
    """Pin the shards that count as `index/N.json`; the newest one if nothing changed.

    Args:
        plan: its digest.
        shards: how many it has; records beyond are of no plan.
    Returns:
        The index's name.
    """
    records.look()
    newest = newest_index(store, plan)
    known = newest.parts if newest else {}
    stored = {name: fact.bytes for name, fact in store.scan(PARTS, suffix=".json")[0].items()}
    parts = []
    for number, (digest, _) in records.seen().items():
        part = known.get(number)
        if part is None or part["records"] != digest or not _is_stored(part, stored):
            part = _write_part(store, records, number, plan=plan, shards=shards)
        parts += [part] if part else []
    if newest and newest.name == index_names(store)[-1] and parts == list(known.values()):
        return newest.name
    return _create(store, canonical_json({"plan": plan, "parts": parts}).encode())


def _write_part(
    store: Store, records: Records, number: int, *, plan: str, shards: int
) -> Record | None:
    """Publish what the records of one folder say now; None if none of them count any more."""
    entries = [e for shard, e in records.read_folder(number)[0].items() if shard < shards]
    if not entries:
        return None
    part, content = make_part(plan, number, entries)
    # Even if it is there: an old one that no index names is garbage, and one may be damaged.
    store.put(part_name(part), content)
    return part


def _is_stored(part: Record, stored: dict[str, int]) -> bool:
    return stored.get(part_name(part)) == part["bytes"]


def _create(store: Store, content: bytes) -> str:
    number = len(index_names(store))
    while not store.create(f"index/{number}.json", content):
        number += 1
    return f"index/{number}.json"
