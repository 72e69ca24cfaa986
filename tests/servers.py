"""PostgreSQL, Redis and other programs as processes that end with the test."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

INSTALL = "apt-get install postgresql redis-server docker-compose"
START_S = 200.0
DATABASE_USER = "postgres"  # of Debian's package; the server refuses to run as root


@dataclass
class Started:
    """A process that a test started."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def kill(self) -> None:
        """Kill it and its descendants at once, as a machine that loses power does."""
        for process in self._family():  # flow runs are in process groups of their own
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def end(self) -> int:
        """Terminate it, kill the descendants that remain, and return its exit status."""
        family = self._family()
        self.process.terminate()
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        self.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return status

    def _family(self) -> list[psutil.Process]:
        try:
            head = psutil.Process(self.process.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_for(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            output = self.log.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, f"ended while it started:\n{output}"
            assert time.monotonic() < deadline, f"did not start:\n{output}"
            time.sleep(0.1)


@contextmanager
def started(
    command: Sequence[str | Path],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    user: Sequence[str] = (),
) -> Iterator[Started]:
    """A process that ends with the block; where setpriv exists, also if we are killed."""
    leash = ["setpriv", *user, "--pdeathsig=KILL"] if shutil.which("setpriv") else []
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*leash, *map(str, command)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Started(process, log)
    try:
        yield running
    finally:
        running.end()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def program(name: str) -> Path:
    """Path of a program; without it the test is skipped, or fails where CI_SERVERS is 1."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    if path := shutil.which(name) or (debian[-1] if debian else None):
        return Path(path)
    message = f"{name} is not installed: {INSTALL}"
    if os.environ.get("CI_SERVERS") == "1":
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def postgres(password: str) -> Iterator[str]:
    """A PostgreSQL with database and user `prefect`; yields HOST:PORT."""
    server, ready, port = program("postgres"), program("pg_isready"), free_port()
    address = ["--host=127.0.0.1", f"--port={port}"]
    with tempfile.TemporaryDirectory(prefix="semix-postgres-") as name:
        folder, user = Path(name), _unprivileged(Path(name))
        _initialize(folder, password, user)
        options = ["-D", folder / "data", "-k", folder, "-h", "127.0.0.1", "-p", str(port), "-F"]
        with started([server, *options], folder / "log", user=user) as process:
            process.wait_for(lambda: subprocess.run([ready, *address, "--quiet"]).returncode == 0)
            sql = [program("createdb"), *address, "--username=prefect", "prefect"]
            subprocess.run(sql, env={**os.environ, "PGPASSWORD": password}, check=True)
            yield f"127.0.0.1:{port}"


def _initialize(folder: Path, password: str, user: Sequence[str]) -> None:
    secret = folder / "password"
    secret.write_text(password)
    secret.chmod(0o644)
    command = [program("initdb"), "--pgdata", folder / "data", "--username=prefect", "--no-sync"]
    command += ["--auth=scram-sha-256", "--pwfile", secret]
    prefix = ["setpriv", *user] if user else []
    completed = subprocess.run([*prefix, *command], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr


def _unprivileged(folder: Path) -> list[str]:
    """Options of setpriv for a process that must not run as root; its user gets `folder`."""
    if os.geteuid():
        return []
    shutil.chown(folder, DATABASE_USER)
    return [f"--reuid={DATABASE_USER}", f"--regid={DATABASE_USER}", "--clear-groups"]


@contextmanager
def redis(password: str) -> Iterator[str]:
    """A Redis with a password; yields HOST:PORT."""
    server, client, port = program("redis-server"), program("redis-cli"), free_port()
    with tempfile.TemporaryDirectory(prefix="semix-redis-") as name:
        config = Path(name) / "redis.conf"
        config.write_text(f"requirepass {password}\nbind 127.0.0.1\nport {port}\ndir {name}\n")
        with started([server, config], Path(name) / "log") as process:
            ping = [client, "-p", port, "ping"]
            environment = {**os.environ, "REDISCLI_AUTH": password}

            def is_ready() -> bool:
                completed = subprocess.run([*map(str, ping)], env=environment, capture_output=True)
                return completed.stdout.strip() == b"PONG"

            process.wait_for(is_ready)
            yield f"127.0.0.1:{port}"
