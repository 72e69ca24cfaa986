"""Fixtures that watch processes, read a run from Prefect's server, and fake a GPU's driver."""

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
        run_filter = {"artifacts": {"flow_run_id": {"any_": [str(run)]}}, "limit": 200}
        with get_client(sync_client=True) as client:  # it has the token that a POST needs
            artifacts = client.request("POST", "/artifacts/filter", json=run_filter).json()
        return {artifact["key"]: artifact for artifact in artifacts}

    return read


@pytest.fixture(scope="session")
def latest_artifact(prefect_api: str) -> Callable[[str], dict[str, Any]]:
    """latest_artifact(key): the newest artifact of a key, as Prefect's pages get it."""

    def read(key: str) -> dict[str, Any]:
        with get_client(sync_client=True) as client:
            artifact: dict[str, Any] = client.request("GET", f"/artifacts/{key}/latest").json()
        return artifact

    return read


@pytest.fixture(scope="session")
def ended_tasks(prefect_api: str) -> Callable[[UUID, int], dict[str, TaskRun]]:
    """ended_tasks(flow run's id, count): its tasks by name, once `count` of them have ended.

    A server records tasks from their events, so they come a moment after their run. After
    `timeout_s` the tasks are returned even if too few ended, so that the test can report it.
    """

    def read(flow_run: UUID, count: int, timeout_s: float = 60) -> dict[str, TaskRun]:
        run_filter = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
        deadline = time.monotonic() + timeout_s
        with get_client(sync_client=True) as client:
            while True:
                tasks = client.read_task_runs(flow_run_filter=run_filter, limit=9)
                final_tasks = [task for task in tasks if task.state and task.state.is_final()]
                if len(final_tasks) >= count or time.monotonic() > deadline:
                    return {task.name: task for task in tasks}
                time.sleep(0.1)

    return read


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(script): replaces that command, in an environment that chooses no GPUs.

    Answers of earlier tests or scripts are not cached.
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
