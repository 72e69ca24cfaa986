"""Who is making which shard: short-lived notes that save double work, never correctness."""

import json
import os
import socket
import time

from data.store import Store, process_alive

TIME_TO_LIVE = 3600.0  # seconds after which another machine's lease counts as forgotten


def claim(store: Store, shard: int) -> bool:
    """Take shard `shard` for this process; False while a living process holds it.

    Two that take over one stale lease at the same moment both win. That costs a shard's work,
    not a wrong result: the commit record is create-only.
    """
    name = _name(shard)
    note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()})
    if store.create(name, note.encode()):
        return True
    if _held(store, name):
        return False
    store.put(name, note.encode())
    return True


def release(store: Store, shard: int) -> None:
    if store.exists(_name(shard)):
        store.delete(_name(shard))


def _name(shard: int) -> str:
    return f"leases/{shard:07d}.json"


def _held(store: Store, name: str) -> bool:
    try:
        note = json.loads(store.get(name))
    except (FileNotFoundError, ValueError):
        return False
    if note["host"] == socket.gethostname():
        return note["pid"] != os.getpid() and process_alive(note["pid"])
    return time.time() - note["time"] < TIME_TO_LIVE
