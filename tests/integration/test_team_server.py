"""The services of docker/compose.yaml as processes: server, workers, store; some are killed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from semix.data.errors import InputError
from semix.data.root import Root
from semix.data.verify import damage
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import build_of
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.worker import main as quiet_worker
from tests.deploying import register
from tests.family import below
from tests.integration.conftest import contents
from tests.pipeline.roots import create_root
from tests.servers import Started
from tests.team import Team, health, team

PATIENCE_S = 400


@pytest.fixture(scope="module")
def servers(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with team(tmp_path_factory.mktemp("team"), s3_server) as team_servers:
        yield team_servers


@contextmanager
def as_client(servers: Team, key: str) -> Iterator[Any]:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    settings = {PREFECT_API_URL: servers.url, PREFECT_API_AUTH_STRING: key}
    with temporary_settings(settings), get_client(sync_client=True) as client:
        yield client


def start_build(servers: Team, **parameters: Any) -> str:
    """Start a run of the deployment; returns its id."""
    with as_client(servers, servers.key) as client:
        deployment = client.read_deployment_by_name("semix-build/semix")
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
    return str(run.id)


def state(servers: Team, run: str) -> str:
    with as_client(servers, servers.key) as client:
        return str(client.read_flow_run(run).state_name)


def last_state(servers: Team, run: str) -> str:
    """Wait until a run ends; returns the name of its last state."""
    final_states = ("Completed", "Failed", "Crashed", "Cancelled")
    until(lambda: state(servers, run) in final_states, every_s=1)
    return state(servers, run)


def until(condition: Callable[[], object], *, every_s: float = 0.05) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every_s)


def write_config(config: BuildConfig, folder: Path) -> str:
    file = folder / "build.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return str(file)


def make_bucket(servers: Team, folder: Path) -> str:
    """Make the store's bucket, as compose's service `bucket` does; returns its URL."""
    python, *arguments = servers.shipped.command("bucket")
    assert python == "python"
    environment = servers.shipped.environment("bucket", folder)
    subprocess.run([sys.executable, *arguments], env=environment, check=True)
    return "s3://semix"


@pytest.mark.parametrize(
    ("key", "told"), [(None, "requires a key"), ("semix:another", "refuses the key")]
)
def test_only_the_key_opens_the_server(servers: Team, key, told):
    from semix.flows.server_probe import require_server

    with as_client(servers, key), pytest.raises(InputError, match=told):
        require_server(servers.url)
    auth = tuple(key.split(":")) if key else None
    assert httpx.get(f"{servers.url}/admin/version", auth=auth).status_code == 401


def test_forged_requests_are_refused(servers: Team):
    """A page of another origin is told no token, and without a token nothing is changed."""
    forged = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{servers.url}/flows/filter", headers=forged)
    assert "access-control-allow-origin" not in preflight.headers
    auth = tuple(servers.key.split(":"))
    response = httpx.post(f"{servers.url}/flows/filter", json={}, auth=auth)
    assert response.status_code == 403 and "CSRF" in response.text


def test_the_settings_are_in_force(servers: Team):
    auth = tuple(servers.key.split(":"))
    settings = httpx.get(f"{servers.url}/admin/settings", auth=auth).json()["server"]
    assert settings["analytics_enabled"] is False
    recorder = settings["services"]["task_run_recorder"]
    assert (recorder["batch_size"], recorder["read_batch_size"]) == (500, 500)
    assert set(settings["services"]["db_vacuum"]["enabled"]) == {"events", "flow_runs"}
    assert settings["events"]["messaging_broker"] == "prefect_redis.messaging"
    pages = httpx.get(servers.url.removesuffix("/api") + "/ui-settings").json()
    assert (pages["api_url"], pages["auth"], pages["csrf_enabled"]) == ("/api", "BASIC", True)


def test_a_deployment_is_built_on_the_team_server(
    servers: Team, hasty_config, built, bucket, tmp_path
):
    out = f"{make_bucket(servers, tmp_path)}/{tmp_path.name}"
    with as_client(servers, servers.key):
        register("build", "semix")
    with servers.worker("builder"):
        config = write_config(hasty_config, tmp_path)
        run = start_build(servers, out=out, config=config, slots=1, device="cpu")
        assert last_state(servers, run) == "Completed", (servers.folder / "builder.log").read_text()
    assert contents(Root(out)) == contents(built)
    assert servers.redis_keys(0) and servers.redis_keys(1)  # events, and the server's own work


def workers_of(process: Started) -> list[psutil.Process]:
    """The shard workers below a Prefect worker."""
    return below(process.process.pid, "semix.pipeline.worker")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_build_survives_its_workers(servers: Team, make_config, hasty_standins, bucket, tmp_path):
    """A shard worker is killed, then the Prefect worker with its flow; another takes the rest."""
    config = make_config(hasty_standins, "generator.steps=40", "shards.groups_per_shard=2")
    quiet = create_root(config, str(tmp_path / "quiet"))
    ensure_prototypes(build_of(quiet), device="cpu")
    assert quiet_worker([quiet.url, "--device", "cpu"]) == 0
    make_bucket(servers, tmp_path)  # again, as at every start
    out, file = f"{bucket}/mixed", write_config(config, tmp_path)
    with as_client(servers, servers.key):
        register("build", "semix")
    root = create_root(config, out)
    with servers.worker("first") as first:
        abandoned = start_build(servers, out=out, config=file, slots=1, device="cpu")
        until(lambda: root.done() and workers_of(first))
        workers_of(first)[0].kill()
        num_done = len(root.done())
        until(lambda: len(root.done()) > num_done)  # started again
        first.kill()
        assert health(servers.worker_environment("first")) != 0
        assert root.missing(), "killed too late to show anything"
    with servers.worker("second"):
        resumed = start_build(servers, out=out, slots=1, device="cpu")
        assert last_state(servers, resumed) == "Completed", (
            servers.folder / "second.log"
        ).read_text()
    assert state(servers, abandoned) == "Running"  # nobody was left to say otherwise
    assert contents(root) == contents(quiet)
    assert damage(root, full=True) == []
