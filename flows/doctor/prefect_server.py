"""Prefect: its home, its database, and the server that is configured."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from flows.doctor.finding import FAILED, OK, WARNING, Finding
from flows.doctor.subject import Subject

LOCK_S = 2.0  # a database that a healthy server uses is free again within a tenth of that


def check(subject: Subject) -> Iterator[Finding]:
    from prefect.settings import PREFECT_HOME

    home = Path(PREFECT_HOME.value())
    yield _home(home)
    facts = subject.server
    if facts is None:
        yield _own(home / "prefect.db")
    elif facts.reason:
        yield Finding("Prefect server", FAILED, facts.url, facts.reason)
    else:
        found = f"{facts.url} runs {facts.version or 'Prefect Cloud'} and takes our requests"
        state = WARNING if facts.warning else OK
        yield Finding("Prefect server", state, found, facts.warning)


def _home(home: Path) -> Finding:
    there = next(place for place in (home, *home.parents) if place.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding("Prefect home", OK, str(home))
    remedy = "set PREFECT_HOME to a folder of yours"
    return Finding("Prefect home", FAILED, f"{home} cannot be written", remedy)


def _own(database: Path) -> Finding:
    """Without a configured server every run starts one, on this database."""
    found = "PREFECT_API_URL is not set: a run starts its own"
    if not database.is_file():
        return Finding("Prefect server", OK, found)
    connection = sqlite3.connect(database, timeout=LOCK_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        remedy = "end the process that holds it, or set PREFECT_HOME to another folder"
        return Finding("Prefect server", FAILED, f"{database}: {error}", remedy)
    finally:
        connection.close()
    return Finding("Prefect server", OK, f"{found}, on {database}")
