"""Server, driver and worker processes that die under a build in a bucket; nothing is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
import yaml

from semix.data.root import Root
from semix.data.verify import damage
from semix.pipeline.plan import build_of
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.worker import main as worker
from tests.integration.conftest import contents
from tests.pipeline.roots import create_root

SEMIX = [sys.executable, "-m", "semix.flows.cli"]


class Server:
    """A Prefect server with a home of its own; can be killed and started on the same port."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"

    def start(self) -> None:
        environment = os.environ | server_settings() | {"PREFECT_HOME": str(self.home)}
        with (self.home / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start", "--port", str(self.port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 180
        while not self._ready():
            assert self.process.poll() is None, (self.home / "server.log").read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)

    def kill(self) -> None:
        kill_tree(self.process.pid)
        self.process.wait()

    def _ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def server_settings() -> dict[str, str]:
    """The settings of docker/server.env."""
    lines = (Path(__file__).parents[2] / "docker" / "server.env").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {**settings, "PREFECT_CLI_PROMPT": "false"}


class Watch:
    """Watches a root from outside: which process began which shard, what is committed.

    Attributes:
        begun: (shard, process) of every lease seen on a shard that was not committed.
    """

    def __init__(self, url: str) -> None:
        self.root = Root(url)
        self.begun: set[tuple[int, int]] = set()
        self._seen: set[tuple[str, bytes]] = set()

    def held(self) -> dict[int, int]:
        """Processes by the shard that they hold and have not committed."""
        processes = {}
        for name in self.root.store.list("leases"):
            try:
                note = self.root.store.get(name)
            except FileNotFoundError:
                continue
            shard = int(Path(name).stem) if Path(name).stem.isdigit() else None
            if shard is not None and not self.root.is_committed(shard):
                processes[shard] = json.loads(note)["pid"]
        self.begun |= set(processes.items())
        return processes

    def done(self) -> int:
        return len(self.root.done())


@contextmanager
def watching(url: str) -> Iterator[Watch]:
    """A watch that reads the leases all the time, in a thread of its own."""
    watch, over = Watch(url), threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            watch.held()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def kill_tree(pid: int) -> list[int]:
    """SIGKILL a process and its descendants; returns their pids."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    for member in family:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    return [member.pid for member in family]


def build(config: Path, out: str, server: Server, log: Path) -> subprocess.Popen:
    environment = {**os.environ, "PREFECT_API_URL": server.url}
    command = [*SEMIX, "build", str(config), "--out", out, "--slots", "2"]
    with log.open("a") as lines:
        return subprocess.Popen(command, env=environment, stdout=lines, stderr=lines)


def quiet_run(config, folder: Path) -> dict[str, object]:
    """The contents of a root that one worker makes undisturbed, without Prefect."""
    root = create_root(config, str(folder))
    ensure_prototypes(build_of(root), device="cpu")
    assert worker([root.url, "--device", "cpu"]) == 0
    return contents(root)


def until(condition: Callable[[], object], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def survive(config, bucket: str, tmp_path: Path) -> None:
    expected = quiet_run(config, tmp_path / "quiet")
    file, log, out = tmp_path / "build.yaml", tmp_path / "build.log", f"{bucket}/mixed"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    server = Server(tmp_path / "prefect")
    server.home.mkdir()
    server.start()
    create_root(config, out)
    killed: list[int] = []
    driver = build(file, out, server, log)
    try:
        with watching(out) as watch:
            until(lambda: watch.done() >= 1 and watch.held())
            pid = next(iter(watch.held().values()))
            os.kill(pid, signal.SIGKILL)  # in the middle of a shard
            killed.append(pid)
            done = watch.done()
            until(lambda: watch.done() > done and watch.held())
            killed += kill_tree(driver.pid)
            driver.wait()
            driver, done = build(file, out, server, log), watch.done()
            until(lambda: watch.done() > done and watch.held())
            server.kill()
            server.start()
            if driver.wait(240) != 0:  # it may have met the hole; the same command goes on
                assert "the same command goes on" in log.read_text()
                driver = build(file, out, server, log)
            assert driver.wait(240) == 0, log.read_text()
        root = Root(out)
        assert contents(root) == expected
        assert damage(root, full=True) == []
        left = [json.loads(root.store.get(name)) for name in root.store.list("leases")]
        assert all(lease["pid"] in killed for lease in left)  # killed between commit and release
        begun = [shard for shard, _ in watch.begun]
        workers = {pid for _, pid in watch.begun}
        # A worker makes one shard while it publishes the one before.
        assert len(begun) - len(set(begun)) <= 2 * len(workers.intersection(killed))
        assert len(workers.intersection(killed)) >= 2
    finally:
        kill_tree(driver.pid)
        server.kill()


def test_a_build_survives_its_worker_driver_and_server(
    make_config, hasty_standins, bucket, tmp_path
):
    pairs = "mixing.pairs={kind: sampled, count: 24}"
    config = make_config(hasty_standins, "generator.steps=20", "shards.groups_per_shard=2", pairs)
    survive(config, bucket, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_build_survives_its_worker_driver_and_server(
    make_config, hasty_standins, bucket, tmp_path
):
    config = make_config(hasty_standins, "generator.steps=60", "shards.groups_per_shard=1")
    survive(config, bucket, tmp_path)
