"""Three rungs of tests: quick, of real processes, and slow.

A test without a marker must start no Python process and no server, so that the first rung stays
quick: one that does fails, with what it started. `smoke` marks the few tests of the first rung
that may; they run first. `process` marks the second rung, and a few tests that are merely long.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Fixtures that start processes.
STARTING = {"prefect_api", "s3_server", "two_processes", "watched", "executed"}
INTEGRATION = Path(__file__).parent / "integration"

_started: list[str] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "os.fork":
        _started.append("a fork")
    if event == "subprocess.Popen" and sys.executable in (command := list(map(str, arguments[1]))):
        _started.append(" ".join(command))


sys.addaudithook(_note)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        smoke = item.get_closest_marker("smoke")
        starting = STARTING & set(getattr(item, "fixturenames", ()))
        if not smoke and (starting or INTEGRATION in item.path.parents):
            item.add_marker("process")
    items.sort(key=lambda item: item.get_closest_marker("smoke") is None)


def pytest_collection_finish() -> None:
    """Take all that was imported out of garbage collection, a third of a second each time."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, since some tests wait; a worker holds about a gigabyte."""
    return min(4, len(os.sched_getaffinity(0)) + 1)


@pytest.fixture(autouse=True)
def _starts_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an unmarked test that starts a process; processes of shared fixtures do not count."""
    _started.clear()
    yield
    marks = {mark.name for mark in request.node.iter_markers()}
    if _started and not marks & {"process", "smoke", "slow", "gpu"}:
        pytest.fail(f"starts a process: mark it process, or do without it: {_started[0]:.200}")
