"""A store: written, read back, refused a second time, listed, deleted; with times."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from data.formats import PLAN
from data.machine import machine
from data.store import Store
from flows.doctor.finding import FAILED, OK, UNCHECKED, WARNING, Finding
from flows.doctor.subject import Subject

T = TypeVar("T")

FOLDER = "doctor"
CONTENT = os.urandom(64 << 10)  # bytes, as of a small shard's record and more
SLOW_S = 2.0  # for one small request; a worker makes about ten a shard


def check(subject: Subject) -> Iterator[Finding]:
    if not subject.out:
        yield Finding("store", UNCHECKED, "no place was given; --out URL")
        return
    store = Store(subject.out)
    if subject.build is not None:
        from pipeline.root import MIXED

        store.refuse_strangers(MIXED, own=PLAN)
    store.check_writable(tidy=True)  # decided within seconds; what follows waits out faults
    made = _missing(store)
    try:
        yield from _tried(store, f"{FOLDER}/probe-{machine()}-{os.getpid()}")
    finally:
        for folder in made:
            with suppress(OSError):  # someone else has begun to write here
                folder.rmdir()


def _tried(store: Store, name: str) -> Iterator[Finding]:
    times: dict[str, float] = {}

    def timed(step: str, work: Callable[[], T]) -> T:
        start = time.monotonic()
        result = work()
        times[step] = time.monotonic() - start
        return result

    try:
        timed("write", lambda: store.put(name, CONTENT))
        faults = [] if timed("read", lambda: store.get(name)) == CONTENT else ["reads other bytes"]
        if timed("create", lambda: store.create(name, b"other")):
            faults.append("lets a name be created twice")
        if name not in timed("list", lambda: store.list(FOLDER)):
            faults.append("does not list what was written")
    finally:
        timed("delete", lambda: store.delete(name))
    if store.exists(name):
        faults.append("keeps what was deleted")
    if faults:
        remedy = "resume would be wrong on it; use another store, or a newer release of its server"
        yield Finding("store", FAILED, f"{store.url} {', '.join(faults)}", remedy)
        return
    found = ", ".join(f"{step} {1000 * seconds:.0f} ms" for step, seconds in times.items())
    slow = max(times.values()) > SLOW_S
    remedy = "it is slow; make shards larger, or go nearer to it" if slow else ""
    yield Finding("store", WARNING if slow else OK, f"{store.url}: {found}", remedy)


def _missing(store: Store) -> list[Path]:
    """Folders that the probe will make, the innermost first."""
    place = Path(store.url) / FOLDER
    return [p for p in (place, *place.parents) if not p.exists()] if store.local else []
