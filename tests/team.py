"""The servers of docker/compose.yaml as processes of this machine."""

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import yaml

from tests.servers import Started, free_port, postgres, program, redis, started

CHECKOUT = Path(__file__).parents[1]
DOCKER = CHECKOUT / "docker"


@dataclass(frozen=True)
class Shipped:
    """docker/compose.yaml with its secrets filled in, and with addresses of local processes.

    Attributes:
        secrets: by the names that docker/example.env leaves empty.
        addresses: the local HOST:PORT by SERVICE:PORT of compose.yaml.
    """

    secrets: Mapping[str, str] = field(default_factory=lambda: random_secrets())
    addresses: dict[str, str] = field(default_factory=dict)

    def command(self, service: str) -> list[str]:
        return [self._fill_in(word) for word in compose()["services"][service]["command"]]

    def environment(self, service: str, home: Path) -> dict[str, str]:
        """The environment of a service, without Prefect's and AWS's variables of this process."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "AWS_"))}
        definition = compose()["services"][service]
        settings = from_files(definition.get("env_file", ())) | definition["environment"]
        local = {"PREFECT_HOME": str(home), "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"}
        return inherited | local | {name: self._fill_in(value) for name, value in settings.items()}

    def _fill_in(self, text: str) -> str:
        text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: self.secrets[match[1]], text)
        assert "$" not in text, text
        for shipped, local in self.addresses.items():
            text = text.replace(shipped, local)
        return text


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))


def compose() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return values


def from_files(names: Sequence[str]) -> dict[str, str]:
    """The settings in env files of compose.yaml."""
    texts = [(DOCKER / name).read_text() for name in names]
    return dict(re.findall(r"(?m)^(\w+)=(.*)$", "\n".join(texts)))


def random_secrets() -> dict[str, str]:
    """A random value for each name that docker/example.env leaves empty."""
    names = re.findall(r"(?m)^(\w+)=$", (DOCKER / "example.env").read_text())
    values = {name: secrets.token_hex(24) for name in names}
    return {name: f"semix:{text}" if "AUTH" in name else text for name, text in values.items()}


def health(service_environment: Mapping[str, str]) -> int:
    """Exit status of the health check in docker/Dockerfile."""
    recipe = (DOCKER / "Dockerfile").read_text().replace("\\\n", "")
    match = re.search(r"^HEALTHCHECK .*? CMD (\[.*\])$", recipe, re.MULTILINE)
    assert match
    _, *arguments = json.loads(match[1])
    completed = subprocess.run(
        [sys.executable, *arguments], env=service_environment, capture_output=True
    )
    return completed.returncode


@dataclass
class Team:
    """A Prefect server on PostgreSQL and Redis, with the address and key for its clients."""

    folder: Path
    shipped: Shipped
    server: Started

    @property
    def url(self) -> str:
        return f"http://{self.shipped.addresses['server:4200']}/api"

    @property
    def key(self) -> str:
        return self.shipped.secrets["PREFECT_API_AUTH_STRING"]

    def redis_keys(self, database: int) -> list[str]:
        port = self.shipped.addresses["redis:6379"].rpartition(":")[2]
        command = [program("redis-cli"), "-p", port, "-n", str(database), "--scan"]
        key = {"REDISCLI_AUTH": self.shipped.secrets["REDIS_PASSWORD"]}
        return subprocess.check_output(command, env={**os.environ, **key}, text=True).split()

    @contextmanager
    def worker(self, name: str) -> Iterator[Started]:
        """The worker service of compose.yaml; it polls for runs when the block begins."""
        environment = self.worker_environment(name)
        command = [sys.executable, "-m", *self.shipped.command("worker"), "--name", name]
        log = self.folder / f"{name}.log"
        with started(command, log, environment=environment) as process:
            process.wait_for(lambda: health(environment) == 0)
            yield process

    def worker_environment(self, name: str) -> dict[str, str]:
        home = self.folder / name
        environment = self.shipped.environment("worker", home)
        # In Compose every container has an address of its own; here workers need their own ports.
        if not (home / "port").exists():
            home.mkdir()
            (home / "port").write_text(str(free_port()))
        port = (home / "port").read_text()
        health_url = environment["SEMIX_HEALTH"].replace(":8080/", f":{port}/")
        return environment | {
            "PREFECT_WORKER_WEBSERVER_PORT": port,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "SEMIX_HEALTH": health_url,
            "SEMIX_CACHE": str(home / "cache"),
        }


@contextmanager
def team(folder: Path, s3_endpoint: str) -> Iterator[Team]:
    """The services postgres, redis and server of compose.yaml; `s3_endpoint` is its store."""
    shipped = Shipped()
    shipped.addresses["store:8333"] = s3_endpoint.removeprefix("http://")
    shipped.addresses["server:4200"] = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        database = postgres(shipped.secrets["POSTGRES_PASSWORD"])
        shipped.addresses["postgres:5432"] = stack.enter_context(database)
        messages = redis(shipped.secrets["REDIS_PASSWORD"])
        shipped.addresses["redis:6379"] = stack.enter_context(messages)
        yield Team(folder, shipped, stack.enter_context(prefect_server(shipped, folder)))


@contextmanager
def prefect_server(shipped: Shipped, folder: Path) -> Iterator[Started]:
    """The server service of compose.yaml; it is healthy when the block begins."""
    port = shipped.addresses["server:4200"].rpartition(":")[2]
    environment = shipped.environment("server", folder / "server")
    environment["SEMIX_HEALTH"] = environment["SEMIX_HEALTH"].replace(":4200/", f":{port}/")
    command = [sys.executable, "-m", *shipped.command("server"), "--port", port]
    with started(command, folder / "server.log", environment=environment) as process:
        process.wait_for(lambda: answers(f"http://127.0.0.1:{port}/api/ready"))
        assert health(environment) == 0
        yield process


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, TimeoutError, ConnectionError):
        return False
