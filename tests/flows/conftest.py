"""What watches processes from outside, and what Prefect's server shows of a run."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest


@pytest.fixture
def until() -> Callable[..., None]:
    """until(condition): returns once it is true, fails after a while."""

    def wait(condition: Callable[[], object], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.05)

    return wait


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """alive(pid): whether a process runs; a zombie does not."""

    def check(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return check


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    """A module file: prints its process id, then sleeps for ten minutes."""
    path = tmp_path / "sleeper.py"
    path.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    return path


@pytest.fixture(scope="session")
def artifacts_of(prefect_api: str) -> Callable[[object], dict[str, dict[str, Any]]]:
    """artifacts_of(flow run's id): its artifacts by key, as Prefect's pages get them."""

    def read(run: object) -> dict[str, dict[str, Any]]:
        chosen = {"artifacts": {"flow_run_id": {"any_": [str(run)]}}, "limit": 200}
        request = Request(
            f"{prefect_api}/artifacts/filter",
            json.dumps(chosen).encode(),
            {"Content-Type": "application/json"},
        )
        return {artifact["key"]: artifact for artifact in json.load(urlopen(request))}

    return read
