"""This machine's clock against the store's and the server's."""

import time
from collections.abc import Iterator

from data.leases import TIME_TO_LIVE
from data.store import Store
from flows.doctor.finding import FAILED, OK, UNCHECKED, WARNING, Finding
from flows.doctor.subject import Subject

MOST_S = 5.0


def check(subject: Subject) -> Iterator[Finding]:
    found = []
    if subject.out:
        store = Store(subject.out)
        # A local store's clock would make its folder; it is this machine's, or its file server's.
        if not store.local or store.exists("plan.json"):
            found.append(judged("store", store.now() - time.time()))
    if subject.server is not None and subject.server.clock_skew_s is not None:
        found.append(judged("Prefect server", subject.server.clock_skew_s))
    yield from found or [Finding("clock", UNCHECKED, "no other clock was asked")]


def judged(whose: str, skew_s: float) -> Finding:
    """How far another clock is off."""
    name = f"clock of {whose}"
    if abs(skew_s) <= MOST_S:
        return Finding(name, OK, f"{skew_s:+.1f} s from this machine's")
    state = FAILED if abs(skew_s) >= TIME_TO_LIVE else WARNING
    remedy = "set this machine's clock: timedatectl set-ntp true"
    return Finding(name, state, f"{skew_s:+,.0f} s from this machine's", remedy)
