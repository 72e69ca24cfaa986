"""How many files and processes one user may have open here."""

import resource
from collections.abc import Iterator

from flows.doctor.finding import OK, WARNING, Finding
from flows.doctor.subject import Subject

FILES = 1024  # a worker with open models, a store's connections and a server stay below
PROCESSES = 512  # threads count too


def check(subject: Subject) -> Iterator[Finding]:
    yield _limit("open files", resource.RLIMIT_NOFILE, FILES, "ulimit -n 4096")
    yield _limit("processes", resource.RLIMIT_NPROC, PROCESSES, "ulimit -u 4096")


def _limit(name: str, kind: int, least: int, remedy: str) -> Finding:
    soft, _ = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= least:
        return Finding(name, OK, "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    return Finding(name, WARNING, f"at most {soft:,}", f"raise the limit: {remedy}")
