"""Leases on shards and other work, which save double work; results do not depend on them."""

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
# A lease is on a shard, a flow's run, a shard of a label set, the prototypes, or the plan.
NAME = re.compile(
    rf"{FOLDER}/(\d{{7}}|run-[0-9a-f]{{16}}|labels-[0-9a-f]{{12}}-\d{{7}}|prototypes|plan)\.json"
)
# Seconds without renewal after which a lease counts as forgotten. A worker renews its lease every
# minute, and its supervisor ends a worker that is silent for so long.
TIME_TO_LIVE = 900.0
RENEW_EVERY_S = 60.0

Holder = tuple[str, int]  # machine and process


def claim(store: Store, work: int | str) -> bool:
    """Take the lease on a shard or other work; False while another living process holds it.

    Two processes that take over a stale lease at the same moment both get it. That costs the work
    of a shard, but gives no wrong result: they publish files create-only.
    """
    name = lease_name(work)
    if store.create(name, _lease_text()):
        return True
    holder = _holder(store, name)
    if holder not in (None, _this_process()):
        info = store.infos(FOLDER).get(name)
        if info is not None and _is_alive(store, holder, info):
            return False
    store.put(name, _lease_text())
    return True


def renew(store: Store, work: int | str) -> None:
    """Renew the lease of this process; a lease that another process took over stays as it is."""
    if _is_ours(store, lease_name(work)):
        store.put(lease_name(work), _lease_text())


def release(store: Store, work: int | str) -> None:
    """Delete the lease of this process; a lease that another process took over stays."""
    if _is_ours(store, lease_name(work)):
        store.delete(lease_name(work))


class LeaseHeartbeat:
    """A heartbeat that also renews the leases of this process, at most once per minute.

    Heartbeats may be nested: the inner one gets the outer one as its `heartbeat`, so that the
    leases of both are renewed. A lease may be released on another thread.

    Args:
        heartbeat: called at each call of this one.
    """

    def __init__(self, store: Store, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._store, self._heartbeat = store, heartbeat
        self._renewed: dict[int | str, float] = {}  # monotonic time of the last renewal, by work
        self._lock = Lock()  # a lease must not be renewed after its release

    @contextmanager
    def holding(self, work: int | str) -> Iterator[None]:
        """Renew the lease on this work, which was just claimed, until the block is left."""
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
                    # A lease only saves double work: failing to renew it is no reason to stop.
                    with suppress(OSError, InputError):
                        renew(self._store, work)
                    self._renewed[work] = time.monotonic()


def living(store: Store, *, others: bool = False) -> set[str]:
    """Names of leases with a living holder; with `others` those of this process are omitted."""
    leases = {name for name, info in store.infos(FOLDER).items() if _is_held(store, name, info)}
    return {name for name in leases if not (others and _is_ours(store, name))}


def forgotten(store: Store) -> dict[str, FileInfo]:
    """Leases whose holder has ended, by name; other files in the folder are ignored."""
    infos = {name: info for name, info in store.infos(FOLDER).items() if NAME.fullmatch(name)}
    return {name: info for name, info in infos.items() if not _is_held(store, name, info)}


def held_by(store: Store, pid: int) -> list[str]:
    """The work that a process of this machine claimed and did not release; it may be dead."""
    holder = (machine(), pid)
    names = (name for name in store.infos(FOLDER) if _holder(store, name) == holder)
    return [name.removeprefix(f"{FOLDER}/").removesuffix(".json") for name in names]


def lease_name(work: int | str) -> str:
    return f"{FOLDER}/{work:07d}.json" if isinstance(work, int) else f"{FOLDER}/{work}.json"


def _lease_text() -> bytes:
    host, pid = _this_process()
    return Lease(host=host, pid=pid).written()


def _is_ours(store: Store, name: str) -> bool:
    return _holder(store, name) == _this_process()


def _this_process() -> Holder:
    return machine(), os.getpid()


def _is_held(store: Store, name: str, info: FileInfo) -> bool:
    return _is_alive(store, _holder(store, name), info)


def _is_alive(store: Store, holder: Holder | None, info: FileInfo) -> bool:
    """Whether the holder of a lease is alive, as far as this machine can tell.

    A process of this machine can be looked up. For another machine, or this one before a reboot,
    only the time of the last renewal is known, by the clock of the store, which both see. If that
    clock was set back, a lease may be from the future; it is trusted no longer than others.
    """
    if holder is None:
        return False
    if holder[0] == machine() and not process_alive(holder[1]):
        return False
    return abs(store.now() - info.modified) < TIME_TO_LIVE


def _holder(store: Store, name: str) -> Holder | None:
    """Machine and process that hold a lease; None if there is no readable one."""
    try:
        lease = Lease.read(store.get(name, max_bytes=Lease.MAX_BYTES), where=f"{store.url}/{name}")
    except (FileNotFoundError, ValueError):
        return None
    return lease.host, lease.pid
