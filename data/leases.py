"""Who is making what: short-lived notes that save double work, never correctness."""

import json
import os
import socket
import time

from data.store import Store, process_alive

TIME_TO_LIVE = 3600.0  # seconds after which another machine's lease counts as forgotten


def claim(store: Store, work: int | str) -> bool:
    """Take a shard, or other work by its name, for this process; False while a living one has it.

    Two that take over one stale lease at the same moment both win. That costs a shard's work,
    not a wrong result: what they publish is create-only.
    """
    name = _name(work)
    note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()})
    if store.create(name, note.encode()):
        return True
    if _held(store, name):
        return False
    store.put(name, note.encode())
    return True


def release(store: Store, work: int | str) -> None:
    if store.exists(_name(work)):
        store.delete(_name(work))


def _name(work: int | str) -> str:
    return f"leases/{work:07d}.json" if isinstance(work, int) else f"leases/{work}.json"


def _held(store: Store, name: str) -> bool:
    try:
        note = json.loads(store.get(name))
    except (FileNotFoundError, ValueError):
        return False
    if note["host"] == socket.gethostname():
        return note["pid"] != os.getpid() and process_alive(note["pid"])
    return time.time() - note["time"] < TIME_TO_LIVE
