"""A note in the store that a flow renews while it lives, so that slots elsewhere end with it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from uuid import uuid4

from data.errors import InputError
from data.leases import FOLDER, claim, lease_name, release, renew
from data.store import Store

RENEW_EVERY_S = 15.0
LOOK_EVERY_S = 5.0
# Some network file systems show a file's new time after a minute only.
FORGOTTEN_AFTER_S = 90.0


@dataclass
class FlowEnded:
    """Whether a flow has ended, asked by a slot on any machine.

    The note's time is only compared with itself: clocks need not agree. Where the store does not
    answer nothing is known, and the slot goes on.
    """

    store: Store
    name: str
    _ended: bool = False
    _modified: float | None = None
    _since: float = field(default_factory=time.monotonic)
    _due: float = 0.0

    def __reduce__(self) -> tuple[type["FlowEnded"], tuple[Store, str]]:
        return type(self), (self.store, self.name)  # the other machine's clock begins anew

    def is_set(self) -> bool:
        """Looks at the store at most every LOOK_EVERY_S seconds."""
        if not self._ended and time.monotonic() >= self._due:
            self._ended = self._look()
            self._due = time.monotonic() + LOOK_EVERY_S
        return self._ended

    def _look(self) -> bool:
        try:
            fact = self.store.facts(FOLDER).get(self.name)
        except (OSError, InputError):  # credentials, too, may be refused for a moment
            self._since = time.monotonic()
            return False
        if fact is None:
            return True
        if fact.modified != self._modified:
            self._modified, self._since = fact.modified, time.monotonic()
        return time.monotonic() - self._since > FORGOTTEN_AFTER_S


class RunLease:
    """The flow's side: the note is there and renewed until `end()`."""

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self._work = f"run-{uuid4().hex[:16]}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run lease", daemon=True)
        claim(self._store, self._work)
        self._thread.start()

    @property
    def stop(self) -> FlowEnded:
        """What the slots are given."""
        return FlowEnded(self._store, lease_name(self._work))

    def end(self) -> None:
        """Tell the slots to end."""
        self._ended.set()
        self._thread.join(RENEW_EVERY_S)
        with suppress(OSError):  # they notice that nobody renews it
            release(self._store, self._work)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_EVERY_S):
            with suppress(OSError, InputError):  # the slots' store is silent as well
                renew(self._store, self._work)


@contextmanager
def run_lease(url: str) -> Iterator[RunLease]:
    lease = RunLease(url)
    try:
        yield lease
    finally:
        lease.end()
