"""A training that is cancelled on Prefect's pages leaves a checkpoint, and goes on from it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from semix.flows.train import train
from tests.calib.runs import assert_same_results
from tests.deploying import register
from tests.family import below
from tests.trainings import (
    checkpoint_of,
    claimed,
    epochs_of,
    processes_on,
    train_here,
    wait_until,
    write_config,
)

CHECKOUT = Path(__file__).parents[2]
EPOCHS = 12
NAME = "cancelled"  # of the deployment, and of its work pool
SERVE = f"""
from semix.flows.train_flow import train_flow
train_flow.serve("{NAME}", pause_on_shutdown=False)
"""
COMMANDS = {
    "serve": ("-c", SERVE),
    "work pool": ("-m", "prefect", "worker", "start", "--pool", NAME, "--name", NAME),
}


@pytest.fixture(params=COMMANDS)
def served(
    request: pytest.FixtureRequest, prefect_api: str, tmp_path: Path
) -> Iterator[subprocess.Popen]:
    """A process that executes runs of the deployment semix-train/cancelled."""
    if request.param == "work pool":
        register("train", NAME)
    environment = {
        **os.environ,
        "PREFECT_API_URL": prefect_api,
        "PYTHONPATH": str(CHECKOUT),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_LOGGING_LEVEL": "INFO",
    }
    command = [sys.executable, *COMMANDS[request.param]]
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        yield process
        process.terminate()
        process.wait(60)


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as prefect_client:
        yield prefect_client


def start_run(client: SyncPrefectClient, config: Path, run: Path) -> FlowRun:
    """Start a run of the deployment, as the button on its page does."""

    deployment_ids = []

    def deployed() -> bool:
        with suppress(ObjectNotFound):
            deployment_ids.append(client.read_deployment_by_name(f"semix-train/{NAME}").id)
        return bool(deployment_ids)

    wait_until(deployed)
    parameters = {"config": str(config), "out": str(run)}
    return client.create_flow_run_from_deployment(deployment_ids[0], parameters=parameters)


def flow_processes(served: subprocess.Popen) -> list[psutil.Process]:
    kinds = ("spawn_main", "prefect.flow_engine", "flow-run execute")
    return [process for kind in kinds for process in below(served.pid, kind, direct=True)]


@pytest.mark.slow
def test_cancelling_leaves_a_checkpoint_from_which_resume_continues(served, client, tmp_path):
    config, run = write_config(tmp_path / "long.yaml", epochs=EPOCHS), tmp_path / "run"
    flow_run = start_run(client, config, run)
    log = tmp_path / "serve.log"
    wait_until(lambda: epochs_of(run) or served.poll() is not None)
    assert served.poll() is None, log.read_text()
    client.set_flow_run_state(flow_run.id, Cancelling())  # as the button on the run's page does
    wait_until(lambda: client.read_flow_run(flow_run.id).state.is_final())
    state = client.read_flow_run(flow_run.id).state
    assert state.is_cancelled(), f"{state}\n{log.read_text()}"
    assert not processes_on(run)
    wait_until(lambda: not flow_processes(served))
    checkpoint = checkpoint_of(run)
    assert checkpoint.state["position"] < EPOCHS
    assert checkpoint.state["step"] > 0
    train(config, run)
    unbroken = train_here(claimed(tmp_path / "unbroken", epochs=EPOCHS).parent)
    assert_same_results(unbroken, run, weights=("model.safetensors", "logits-base.safetensors"))
