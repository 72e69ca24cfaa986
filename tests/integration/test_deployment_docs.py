"""docs/deployments.md: its commands as they are written, in order, on real processes."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from semix.data.root import Root
from semix.pipeline.config import BuildConfig
from tests.integration.conftest import contents
from tests.servers import free_port, started
from tests.team import answers

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "deployments.md"
PORT = "4200"
STAYS = ("(set -a;", "prefect worker start")  # each in a terminal of its own

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def blocks(page: str) -> list[str]:
    """Commands to run, in order; commands that cannot run here are in blocks of no language."""
    return re.findall(r"(?ms)^```bash\n(.*?)^```$", page)


@pytest.fixture(scope="module")
def home(hasty_config: BuildConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "data").mkdir()
    config = yaml.safe_dump(hasty_config.model_dump(mode="json"))
    (folder / "data" / "build.yaml").write_text(config)
    return folder


@pytest.fixture(scope="module")
def page_runs(home: Path) -> Iterator[list[FlowRun]]:
    """Run all commands of the page; yields the flow runs that they started, once all ended."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}/api"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    programs = os.pathsep.join([str(Path(sys.executable).parent), inherited["PATH"]])
    environment = inherited | {"HOME": str(home), "PATH": programs, "PREFECT_SERVER_API_PORT": port}
    exports = ""
    with ExitStack() as stack:
        for number, block in enumerate(blocks(PAGE.read_text().replace(PORT, port))):
            exports += block if block.startswith("export ") else ""
            command = ["bash", "-euc", f"cd {CHECKOUT}\n{exports}\n{block}"]
            if block.startswith(STAYS):
                process = started(command, home / f"{number}.log", environment=environment)
                stack.enter_context(process)
                if block.startswith(STAYS[0]):
                    wait_until(lambda: answers(f"{url}/ready"))
            else:
                run_block(command, environment)
        key = (home / ".semix-key").read_text().strip()
        with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: key}):
            yield runs_once_ended()


def run_block(command: list[str], environment: Mapping[str, str]) -> None:
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600
    )
    assert completed.returncode == 0, f"{command[-1]}\n{completed.stdout}\n{completed.stderr}"


def wait_until(condition, *, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.5)


def unscheduled_runs() -> list[FlowRun]:
    """The runs that no schedule started, in the order of their start."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(limit=100, sort=FlowRunSort.EXPECTED_START_TIME_ASC)
    return [run for run in runs if not run.auto_scheduled]


def runs_once_ended() -> list[FlowRun]:
    wait_until(lambda: all(run.state and run.state.is_final() for run in unscheduled_runs()))
    return unscheduled_runs()


def test_the_runs_end_as_the_page_says(page_runs: list[FlowRun]) -> None:
    outs = [Path(run.parameters["out"]).name for run in page_runs]
    assert outs == ["mixed", "mixed", "other", "wide", "wide"]
    assert [run.state_name for run in page_runs] == [
        *("Completed", "Completed", "Cancelled"),
        *("Completed", "Completed"),
    ]


def test_the_datasets_are_what_a_quiet_build_makes(
    page_runs: list[FlowRun], home: Path, built: Root
) -> None:
    for name in ("mixed", "wide"):
        assert contents(Root(str(home / "data" / name))) == contents(built)


def test_the_deployments_and_automations_are_there(page_runs: list[FlowRun]) -> None:
    kinds = {"build", "relabel", "train", "evaluate", "study", "quickstart"}
    with get_client(sync_client=True) as client:
        for pool in ("semix", "semix-docker", "semix-kubernetes"):
            for kind in kinds:
                deployment = client.read_deployment_by_name(f"semix-{kind}/{pool}")
                assert deployment.entrypoint == f"semix.flows.{kind}_flow.{kind}_flow"
                assert not deployment.pull_steps
                image = deployment.job_variables.get("image")
                assert image == (None if pool == "semix" else "semix:cuda")
                assert deployment.job_variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
        nightly, dask = (
            client.read_deployment_by_name(f"semix-build/{name}") for name in ("nightly", "dask")
        )
        assert not nightly.pull_steps and not nightly.schedules
        assert nightly.global_concurrency_limit.limit == 1
        assert nightly.concurrency_options.collision_strategy == "CANCEL_NEW"
        assert dask.parameters == {"runner": "dask", "cluster": "tcp://scheduler:8786"}
        assert len(client.read_automations()) == 3


def test_the_array_script_makes_its_share_of_a_dataset(
    hasty_config: BuildConfig, built: Root, tmp_path: Path
) -> None:
    match = re.search(r"(?ms)^```sh\n(.*?)^```$", PAGE.read_text())
    assert match
    (tmp_path / "job.sh").write_text(match[1])
    config = yaml.safe_dump(hasty_config.model_dump(mode="json"))
    (tmp_path / "build.yaml").write_text(config)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    settings = {"DATA": str(tmp_path), "TMPDIR": str(tmp_path), "SLURM_ARRAY_TASK_COUNT": "2"}
    path = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited["PATH"]])}
    for task in ("0", "1"):
        slurm = {"SLURM_JOB_ID": f"7{task}", "SLURM_ARRAY_TASK_ID": task}
        run_block(["bash", str(tmp_path / "job.sh")], inherited | settings | path | slurm)
    assert contents(Root(str(tmp_path / "mixed"))) == contents(built)
