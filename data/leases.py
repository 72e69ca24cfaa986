"""Who is making what: short-lived notes that save double work, never correctness."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock

from semix.data.errors import InputError
from semix.data.formats import Lease
from semix.data.machine import machine
from semix.data.store import FileInfo, Store, process_alive

FOLDER = "leases"
# On a shard, a flow's run, a shard of a label set, the prototypes, the plan: no others are claimed.
NAME = re.compile(
    rf"{FOLDER}/(\d{{7}}|run-[0-9a-f]{{16}}|labels-[0-9a-f]{{12}}-\d{{7}}|prototypes|plan)\.json"
)
# Seconds without renewal after which a lease counts as forgotten. Whoever works renews each
# minute, and a worker that is silent for so long is ended by whoever supervises it.
TIME_TO_LIVE = 900.0
RENEW_EVERY_S = 60.0

Holder = tuple[str, int]  # machine and process


def claim(store: Store, work: int | str) -> bool:
    """Take a shard, or other work by its name, for this process; False while a living one has it.

    Two that take over one stale lease at the same moment both win. That costs a shard's work,
    not a wrong result: what they publish is create-only.
    """
    name = lease_name(work)
    if store.create(name, _note()):
        return True
    holder = _holder(store, name)
    if holder not in (None, _us()):
        info = store.infos(FOLDER).get(name)
        if info is not None and _lives(store, holder, info):
            return False
    store.put(name, _note())
    return True


def renew(store: Store, work: int | str) -> None:
    """Say that this process still works on what it claimed; a lease that was taken over stays."""
    if _is_ours(store, lease_name(work)):
        store.put(lease_name(work), _note())


def release(store: Store, work: int | str) -> None:
    """Give up what this process claimed; a lease that was taken over stays."""
    if _is_ours(store, lease_name(work)):
        store.delete(lease_name(work))


class LeaseHeartbeat:
    """A beat that also renews, now and then, the leases on the work this process is at.

    Beats may be nested: work within work is handed the outer one as its `heartbeat`, so that the
    leases of both are renewed. What is held may be let go on another thread.

    Args:
        heartbeat: called each time.
    """

    def __init__(self, store: Store, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._store, self._heartbeat = store, heartbeat
        self._renewed: dict[int | str, float] = {}  # by work, monotonic
        self._lock = Lock()  # what was let go, and then released, must not be renewed after that

    @contextmanager
    def holding(self, work: int | str) -> Iterator[None]:
        """Renew the lease on this, which was claimed a moment ago, until the block is left."""
        self._renewed[work] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._renewed[work]

    def __call__(self) -> None:
        self._heartbeat()
        with self._lock:
            for work, renewed in list(self._renewed.items()):
                if time.monotonic() - renewed >= RENEW_EVERY_S:
                    # A lease only saves double work: no reason to give up the work it is on.
                    with suppress(OSError, InputError):
                        renew(self._store, work)
                    self._renewed[work] = time.monotonic()


def living(store: Store, *, others: bool = False) -> set[str]:
    """Names of the leases whose holder lives; this process included, unless `others` is set."""
    held = {name for name, info in store.infos(FOLDER).items() if _held(store, name, info)}
    return {name for name in held if not (others and _is_ours(store, name))}


def forgotten(store: Store) -> dict[str, FileInfo]:
    """Leases whose holder is gone, by name; other files that lie there are none."""
    infos = {name: info for name, info in store.infos(FOLDER).items() if NAME.fullmatch(name)}
    return {name: info for name, info in infos.items() if not _held(store, name, info)}


def held_by(store: Store, pid: int) -> list[str]:
    """The work that a process of this machine claimed and did not release, dead or alive."""
    us = (machine(), pid)
    held = (name for name in store.infos(FOLDER) if _holder(store, name) == us)
    return [name.removeprefix(f"{FOLDER}/").removesuffix(".json") for name in held]


def lease_name(work: int | str) -> str:
    return f"{FOLDER}/{work:07d}.json" if isinstance(work, int) else f"{FOLDER}/{work}.json"


def _note() -> bytes:
    host, pid = _us()
    return Lease(host=host, pid=pid).written()


def _is_ours(store: Store, name: str) -> bool:
    return _holder(store, name) == _us()


def _us() -> Holder:
    return machine(), os.getpid()


def _held(store: Store, name: str, info: FileInfo) -> bool:
    return _lives(store, _holder(store, name), info)


def _lives(store: Store, holder: Holder | None, info: FileInfo) -> bool:
    """Whether a holder lives, as far as this machine can tell.

    A process of this machine lives or does not. Of another machine, or of this one before it
    started anew, only the time of the last renewal is known, by the clock of the store, which is
    the only one that both see. A lease from the store's future means that this clock was set
    back; it is believed no longer than others.
    """
    if holder is None:
        return False
    if holder[0] == machine() and not process_alive(holder[1]):
        return False
    return abs(store.now() - info.modified) < TIME_TO_LIVE


def _holder(store: Store, name: str) -> Holder | None:
    """Machine and process; None where no lease is, or none that can be read."""
    try:
        note = Lease.read(store.get(name, most=Lease.MOST), where=f"{store.url}/{name}")
    except (FileNotFoundError, ValueError):
        return None
    return note.host, note.pid
