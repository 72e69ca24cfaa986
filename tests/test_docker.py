"""docker/: what can be tested without a container engine."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.servers import program
from tests.team import CHECKOUT, DOCKER, compose, random_secrets

RECIPE = (DOCKER / "Dockerfile").read_text().replace("\\\n", "")
COMPOSE = (DOCKER / "compose.yaml").read_text()
SERVER = (DOCKER / "server.env").read_text()
SERVICES: dict[str, dict[str, Any]] = compose()["services"]
SECRET = re.compile(r"PASSWORD|SECRET|AUTH|ACCESS_KEY")


def stages() -> dict[str, list[str]]:
    """The lines of every stage by its name, after those of the stage that it starts from."""
    lines_by_stage: dict[str, list[str]] = {}
    for line in RECIPE.splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            lines = lines_by_stage[match[2]] = list(lines_by_stage.get(match[1], []))
        elif lines_by_stage and not line.startswith("#"):
            lines.append(line)
    return lines_by_stage


def config(**environment: str) -> "subprocess.CompletedProcess[str]":
    """`docker-compose config` on compose.yaml with these variables."""
    command = [program("docker-compose"), "--file", DOCKER / "compose.yaml", "config"]
    variables = {"PATH": os.environ["PATH"], "HOME": "/nowhere", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="hadolint comes for Linux")
def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    completed = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout


def test_compose_takes_the_file():
    completed = config(**random_secrets(), COMPOSE_PROFILES="gpu")
    assert completed.returncode == 0, completed.stderr
    assert re.findall(r"^  ([\w-]+):\n    build:", completed.stdout, re.M) == [
        "bucket",
        "server",
        "worker",
        "worker-gpu",
    ]


@pytest.mark.parametrize("name", random_secrets())
def test_compose_refuses_to_start_without_a_secret(name):
    completed = config(**{**random_secrets(), name: ""})
    assert completed.returncode != 0
    assert "Missing mandatory value" in completed.stderr
    assert "docker/example.env" in completed.stderr


def test_no_secret_has_a_default_or_is_written_down():
    used = set(re.findall(r"\$\{(\w+)", COMPOSE))
    secrets = {name for name in used if SECRET.search(name)}
    assert secrets == set(random_secrets())
    for name in secrets:
        assert not re.search(rf"\${{{name}(?!:\?)", COMPOSE), name
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if SECRET.search(name):
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), name
    for text in (RECIPE, SERVER):
        assert not SECRET.search(re.sub(r"(?m)^#.*", "", text))


def test_the_example_names_every_variable():
    example = (DOCKER / "example.env").read_text()
    variables = set(re.findall(r"(?m)^#?(\w+)=", example)) - {"COMPOSE_PROJECT_NAME"}
    assert variables == set(re.findall(r"\$\{(\w+)", COMPOSE))
    shown_defaults = dict(re.findall(r"(?m)^#(\w+)=(.*)$", example))
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE))
    assert shown_defaults == defaults


def test_ports_open_on_the_loopback_unless_told_otherwise():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"store", "server"}
    for ports in published.values():
        assert all(port.startswith("${SEMIX_BIND:-127.0.0.1}:") for port in ports)


def test_the_database_and_messages_are_reached_by_the_server_alone():
    at_back = {name for name, service in SERVICES.items() if "back" in service["networks"]}
    assert at_back == {"postgres", "redis", "server"}
    assert compose()["networks"]["back"] == {"internal": True}


def test_images_are_pinned_and_a_digest_has_its_place():
    for name, service in SERVICES.items():
        variable, image, tag = re.fullmatch(
            r"\$\{(\w+_IMAGE):-([\w/-]+):([\w.-]+)\}", service["image"]
        ).groups()
        assert variable and image and tag != "latest", name
        assert image == "semix" or re.match(r"\d+\.\d+", tag), name
    bases = re.findall(r"(?m)^FROM (\S+) AS", RECIPE)
    assert set(bases) <= {"${PYTHON_IMAGE}", *stages()}
    assert re.search(r"(?m)^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", RECIPE)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_runs_unprivileged_with_init_and_a_health_check(target):
    lines = stages()[target]
    users = [line for line in lines if line.startswith("USER")]
    assert users[-1] == "USER 10001:10001"
    assert 'ENTRYPOINT ["tini", "--"]' in lines
    assert sum(line.startswith("HEALTHCHECK") for line in lines) == 1
    assert ("triton" in "\n".join(lines)) == (target == "cuda")


WORKERS = ("worker", "worker-gpu")
NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"])]
NAMESPACE += ["--pid", "--fork", "--mount-proc", "--kill-child"]
# The worker ends at once, as Prefect's does; its trainer notices that the lifeline is closed.
WORKER = """
import time
from semix.flows import child
child.start(child.python_module("slow_to_end", grace_s=120.0))
time.sleep(300)
"""
TRAINER = """
import pathlib, signal, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path("started").touch()
while not told:
    time.sleep(0.02)
time.sleep(2)
pathlib.Path("checkpoint").write_text(str(len(told)))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
def test_a_workers_container_ends_after_the_last_checkpoint(tmp_path):
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes here")
    (tmp_path / "slow_to_end.py").write_text(TRAINER)
    init, group, end, *script = SERVICES["worker"]["entrypoint"]
    assert (init, group, end) == ("tini", "-g", "--")
    script = [word.replace("$$", "$") for word in script]
    process = subprocess.Popen(
        [*NAMESPACE, *script, sys.executable, "-c", WORKER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(CHECKOUT), str(tmp_path)))},
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.02)
    (shell,) = psutil.Process(process.pid).children()
    for member in (shell, *shell.children()):  # their process group, as `tini -g` does
        member.terminate()
    assert process.wait(100) == 128 + signal.SIGTERM
    assert (tmp_path / "checkpoint").read_text() == "1"  # it got one signal


def test_a_workers_container_is_killed_only_after_a_trainers_grace():
    from semix.flows.launcher import GRACE_S

    for name in WORKERS:
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > GRACE_S


def test_what_torch_compiles_lies_where_it_may_be_executed():
    """Its folder is below a volume: a tmpfs is mounted noexec, and all else is read-only."""
    match = re.search(r"TORCHINDUCTOR_CACHE_DIR=(\S+)", RECIPE)
    assert match
    for name in WORKERS:
        service = SERVICES[name]
        volumes = [volume.split(":")[1] for volume in service["volumes"] if ":ro" not in volume]
        assert any(Path(match[1]).is_relative_to(folder) for folder in volumes)
        assert not any(Path(match[1]).is_relative_to(folder) for folder in service["tmpfs"])


def test_everything_installed_is_hashed():
    installs = re.findall(r"(?:uv )?pip install[^&\n]*", RECIPE)
    assert len(installs) == 4
    for line in installs:
        hashed = "--require-hashes" in line
        assert hashed or shlex.split(line)[3:] == ["--no-deps", "--no-build-isolation", "."]
    uv = (DOCKER / "uv.txt").read_text()
    assert re.match(r"uv==\S+ ", uv) and "--hash=sha256:" in uv and "://" not in uv
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"--extra (\S+)", RECIPE))
    assert extras == set(project["optional-dependencies"]) - {"dev", "docs"}


def test_what_is_copied_is_there_and_nothing_else_is_sent():
    copied = set()
    for line in re.findall(r"(?m)^COPY (?!--from)(.+)$", RECIPE):
        copied |= set(line.split()[:-1])
    assert all((CHECKOUT / source).exists() for source in copied)
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_every_service_is_watched_confined_and_bounded():
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name == "bucket":  # it ends
            continue
        has_own_check = "build" in service and "SEMIX_HEALTH" in service["environment"]
        assert has_own_check or service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", name
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert service["volumes"], name
    for service in SERVICES.values():
        for condition in service.get("depends_on", {}).values():
            assert condition["condition"] in ("service_healthy", "service_completed_successfully")


def test_volumes_are_named_and_gpus_are_asked_for_by_profile():
    mounted = [v for service in SERVICES.values() for v in service.get("volumes", [])]
    volumes = {volume.split(":")[0] for volume in mounted if not volume.startswith("$")}
    assert volumes == set(compose()["volumes"])
    gpu = SERVICES["worker-gpu"]
    assert gpu["profiles"] == ["gpu"]
    assert gpu["build"]["target"] == "cuda"
    devices = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


def test_prefect_knows_every_setting():
    from prefect.settings import Settings
    from prefect_redis.cleanup_queue import RedisWorkerCleanupQueueSettings
    from prefect_redis.client import RedisMessagingSettings

    settings = set(names_of(Settings))
    settings |= {
        f"PREFECT_REDIS_MESSAGING_{name.upper()}" for name in RedisMessagingSettings.model_fields
    }
    queue = RedisWorkerCleanupQueueSettings.model_fields
    settings |= {f"PREFECT_REDIS_WORKER_CLEANUP_QUEUE_{name.upper()}" for name in queue}
    used = set(re.findall(r"\b(PREFECT_\w+)[:=]", COMPOSE)) - {"PREFECT_PORT"}
    used |= set(re.findall(r"\b(PREFECT_\w+)=", RECIPE + SERVER))
    assert len(used) > 10
    assert used <= settings


def names_of(settings: Any) -> list[str]:
    """The environment variables of a settings class and of the settings classes inside it."""
    from prefect.settings.base import PrefectBaseSettings

    names = []
    for name, field in settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, PrefectBaseSettings):
            names += names_of(kind)
        names.append(f"{settings.model_config.get('env_prefix')}{name}".upper())
        choices = getattr(field.validation_alias, "choices", [])
        names += [alias.upper() for alias in choices if isinstance(alias, str)]
    return names


def test_the_health_check_is_a_command():
    match = re.search(r"(?m)^HEALTHCHECK .*? CMD (\[.*\])$", RECIPE)
    assert match and json.loads(match[1])[:2] == ["python", "-c"]
