"""Deployments with real workers: a run, failures that are resumed, machines that die, ranges."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed, Pending, Running

from semix.data.root import Root
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import build_of
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.standins import StandIns
from semix.pipeline.worker import main as worker
from tests.deploying import register
from tests.integration.conftest import contents
from tests.pipeline.roots import create_root
from tests.servers import Started, free_port, started
from tests.team import answers

AUTOMATIONS = Path(__file__).parents[2] / "docker" / "automations.yaml"

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Site:
    """A Prefect server, and environments and workers for its machines."""

    url: str
    folder: Path

    def environment(self, name: str) -> dict[str, str]:
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")
        }
        home = {"PREFECT_HOME": str(self.folder / name), "PREFECT_API_URL": self.url}
        frequencies = {
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        }
        return inherited | home | frequencies

    @contextmanager
    def worker(self, pool: str, *, name: str = "worker", limit: int = 2) -> Iterator[Started]:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
        command += ["--name", name, "--limit", str(limit)]
        log = self.folder / f"{name}.log"
        with started(command, log, environment=self.environment(name)) as process:
            try:
                yield process
            finally:
                end_all(process)


def end_all(machine: Started) -> None:
    """Kill a machine's worker, its flows and their processes, as a loss of power does."""
    if machine.process.poll() is not None:
        return
    processes = psutil.Process(machine.process.pid).children(recursive=True)
    machine.kill()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server of its own, which evaluates automations."""
    folder, port = tmp_path_factory.mktemp("site"), free_port()
    new_site = Site(f"http://127.0.0.1:{port}/api", folder)
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
    environment = new_site.environment("server") | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    with started(command, folder / "server.log", environment=environment) as process:
        process.wait_for(lambda: answers(f"{new_site.url}/ready"))
        with temporary_settings({PREFECT_API_URL: new_site.url}):
            yield new_site


@pytest.fixture(scope="module")
def automations(site: Site) -> None:
    """The shipped automations, with shorter times."""
    text = AUTOMATIONS.read_text()
    for shipped, shorter in {
        "within: 30\n": "within: 10\n",
        "within: 300 ": "within: 45 ",
        "threshold: 8 ": "threshold: 4 ",
    }.items():
        assert text.count(shipped) == 1
        text = text.replace(shipped, shorter)
    file = site.folder / "automations.yaml"
    file.write_text(text)
    command = [sys.executable, "-m", "prefect", "automation", "create", "--from-file", str(file)]
    completed = subprocess.run(
        command, env=site.environment("server"), capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.fixture
def client(site: Site) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="module")
def config_file(hasty_config: BuildConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "build.yaml"
    path.write_text(yaml.safe_dump(hasty_config.model_dump(mode="json")))
    return str(path)


def until(condition: Callable[[], object], *, timeout_s: float = 400) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def start(client: SyncPrefectClient, deployment: str, parameters: Mapping[str, Any]) -> UUID:
    entry = client.read_deployment_by_name(deployment)
    return client.create_flow_run_from_deployment(entry.id, parameters=dict(parameters)).id


def is_in(client: SyncPrefectClient, run: UUID, *names: str) -> FlowRun | None:
    flow_run = client.read_flow_run(run)
    return flow_run if flow_run.state_name in names else None


@pytest.mark.slow
def test_a_worker_runs_a_deployment(
    site: Site, client: SyncPrefectClient, config_file: str, built: Root, tmp_path: Path
) -> None:
    out = str(tmp_path / "mixed")
    register("build", "here")
    with site.worker("here"):
        run = start(client, "semix-build/here", {"config": config_file, "out": out})
        until(lambda: is_in(client, run, "Completed", "Failed", "Crashed"))
        assert is_in(client, run, "Completed"), (site.folder / "worker.log").read_text()[-3000:]
    assert contents(Root(out)) == contents(built)
    assert Root(out).indices()


@pytest.mark.slow
def test_a_failed_build_is_resumed_and_a_refused_one_is_not(
    site: Site,
    automations: None,
    client: SyncPrefectClient,
    config_file: str,
    hasty_config: BuildConfig,
    built: Root,
    tmp_path: Path,
) -> None:
    register("build", "failing")
    root = create_root(hasty_config, str(tmp_path / "mixed"))
    obstacle = Path(root.url) / "shards/0000/0000003.json"  # where a commit record goes
    obstacle.mkdir(parents=True)
    with site.worker("failing"):
        shared = {"config": config_file, "out": root.url}
        run = start(client, "semix-build/failing", shared)
        invalid = start(client, "semix-build/failing", shared | {"config": "/data/lost.yaml"})
        until(lambda: is_in(client, run, "Failed"))
        assert set(Root(root.url).done()) == {0, 1, 2, 4, 5, 6, 7}
        obstacle.rmdir()
        until(lambda: is_in(client, run, "Completed"))
    resumed, rejected = client.read_flow_run(run), client.read_flow_run(invalid)
    assert (resumed.run_count, resumed.parameters["config"]) == (2, config_file)
    assert contents(Root(root.url)) == contents(built)
    assert (rejected.state_name, rejected.run_count) == ("Failed", 1)
    assert "InputError: config = /data/lost.yaml" in str(rejected.state and rejected.state.message)


@pytest.mark.slow
def test_a_run_whose_machine_died_goes_on_elsewhere(
    site: Site,
    automations: None,
    client: SyncPrefectClient,
    config_file: str,
    built: Root,
    tmp_path: Path,
) -> None:
    register("build", "dying")
    root = tmp_path / "mixed"
    with site.worker("dying", name="first") as machine:
        run = start(client, "semix-build/dying", {"config": config_file, "out": str(root)})
        until(lambda: list(root.glob("shards/*/*.json")))
        end_all(machine)
    before = set(Root(str(root)).done())
    assert is_in(client, run, "Running"), "nobody is left to say otherwise"
    with site.worker("dying", name="second"):
        until(lambda: is_in(client, run, "Completed"))
    states = [state.name for state in client.read_flow_run_states(run)]
    assert states.count("Crashed") == 1
    assert client.read_flow_run(run).run_count == 2
    assert before, "a shard was committed before the machine died"
    assert contents(Root(str(root))) == contents(built)
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    until(lambda: all_ended(client.read_task_runs(flow_run_filter=of_run)))


def all_ended(tasks: list[TaskRun]) -> bool:
    """Whether all tasks ended, those of the lost attempt too."""
    return all(task.state is not None and task.state.is_final() for task in tasks)


@pytest.mark.slow
def test_a_run_that_never_starts_is_not_resumed_for_ever(
    site: Site, automations: None, client: SyncPrefectClient
) -> None:
    """Its machine or image fails before the run begins, so its own count of attempts stands."""
    register("build", "nowhere")
    run = start(client, "semix-build/nowhere", {"out": "/data/mixed"})
    for state in (Pending(), Running(), Crashed()):
        client.set_flow_run_state(run, state)
    ends = 0
    while not is_in(client, run, "Cancelled"):
        until(lambda: is_in(client, run, "AwaitingRetry", "Cancelled"))
        for state in (Pending(), Crashed()):
            client.set_flow_run_state(run, state)
        ends += 1
        assert ends < 10, "resumed for ever"
        until(lambda: is_in(client, run, "AwaitingRetry", "Crashed", "Cancelled"))
    assert ends >= 2
    assert client.read_flow_run(run).run_count == 1


@pytest.mark.slow
def test_two_ranges_on_two_machines_make_one_root(
    site: Site,
    client: SyncPrefectClient,
    make_config: Callable[..., BuildConfig],
    hasty_standins: StandIns,
    tmp_path: Path,
) -> None:
    # Long enough that neither machine is done before the other begins.
    config = make_config(hasty_standins, "generator.steps=100")
    (tmp_path / "build.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    quiet = create_root(config, str(tmp_path / "quiet"))
    ensure_prototypes(build_of(quiet), device="cpu")
    assert worker([quiet.url, "--device", "cpu"]) == 0
    register("build", "ranges")
    shared = {"config": str(tmp_path / "build.yaml"), "out": str(tmp_path / "mixed")}
    with (
        site.worker("ranges", name="one", limit=1),
        site.worker("ranges", name="two", limit=1),
    ):
        runs = [start(client, "semix-build/ranges", shared | {"range": f"{i}/2"}) for i in range(2)]
        for run in runs:
            until(lambda run=run: is_in(client, run, "Completed", "Failed"))
            assert is_in(client, run, "Completed"), client.read_flow_run(run).state
    root = Root(str(tmp_path / "mixed"))
    assert contents(root) == contents(quiet)
    first_worker, second_worker = (root.record(n).worker for n in (0, root.plan.num_shards // 2))
    assert first_worker != second_worker, "each began with a part of its own"
