"""What watches processes from outside, what Prefect's server shows of a run, a GPU's driver."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun
from semix.flows.gpus import driver_gpus


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
        with get_client(sync_client=True) as client:  # it has the token that a POST needs
            found = client.request("POST", "/artifacts/filter", json=chosen).json()
        return {artifact["key"]: artifact for artifact in found}

    return read


@pytest.fixture(scope="session")
def latest_artifact(prefect_api: str) -> Callable[[str], dict[str, Any]]:
    """latest_artifact(key): the newest artifact of a key, as Prefect's pages get it."""

    def read(key: str) -> dict[str, Any]:
        with get_client(sync_client=True) as client:
            found: dict[str, Any] = client.request("GET", f"/artifacts/{key}/latest").json()
        return found

    return read


@pytest.fixture(scope="session")
def ended_tasks(prefect_api: str) -> Callable[[UUID, int], dict[str, TaskRun]]:
    """ended_tasks(flow run's id, count): its tasks by name, once the server tells of so many ends.

    A server records tasks from their events, so they come a moment after their run. Too few of
    them after a while are returned as they are, for a test's own words.
    """

    def read(flow_run: UUID, count: int, timeout_s: float = 60) -> dict[str, TaskRun]:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
        deadline = time.monotonic() + timeout_s
        with get_client(sync_client=True) as client:
            while True:
                tasks = client.read_task_runs(flow_run_filter=chosen, limit=9)
                ended = [task for task in tasks if task.state and task.state.is_final()]
                if len(ended) >= count or time.monotonic() > deadline:
                    return {task.name: task for task in tasks}
                time.sleep(0.1)

    return read


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(script): what that command does here, where nothing else chose GPUs.

    What was asked before, in another test or of another script, is forgotten.
    """
    folder = tmp_path / "nvidia"
    folder.mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def write(script: str) -> None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
        driver_gpus.cache_clear()

    yield write
    driver_gpus.cache_clear()
