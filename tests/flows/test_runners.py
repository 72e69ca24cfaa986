"""The same build on this machine, on Dask and on Ray; workers are killed on the way."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from socket import create_server, socket
from subprocess import PIPE, STDOUT
from typing import Any

import psutil
import pytest
from prefect import flow
from prefect.context import FlowRunContext

from semix.data.errors import InputError
from semix.data.root import Root, RootProgress
from semix.flows.slots import SlotSettings
from semix.flows.slots.running import follow, run_slots
from semix.flows.slots.slot import LEASE_TIMEOUT_S
from semix.pipeline.plan import build_of
from semix.pipeline.prototypes import ensure_prototypes
from tests.family import below
from tests.handmade import committed
from tests.integration.conftest import contents
from tests.pipeline.roots import create_root

CHECKOUT = Path(__file__).parents[2]
SHARDS = 8


@flow(persist_result=False, result_serializer="json")
def make(url: str, settings: SlotSettings, *, enough: int = 0) -> dict[str, Any]:
    """Make the missing shards; with `enough`, raise once so many more shards are committed."""
    root, before = Root(url), len(committed(Root(url)))

    def look(progress: RootProgress) -> None:
        if enough and progress.done >= before + enough:
            raise ValueError("enough")

    with run_slots(url, settings) as futures:
        errors = follow(futures, root, listeners=(look,))
        results = [] if errors else [future.result() for future in futures]
    return {"run": FlowRunContext.get().flow_run.id, "errors": errors, "results": results}


@pytest.fixture
def started(built: Root, hasty_config, tmp_path: Path) -> Root:
    """A root with prototypes and no shards."""
    root = create_root(hasty_config, str(tmp_path / "mixed"))
    root.store.create("prototypes.safetensors", built.store.get("prototypes.safetensors"))
    return root


@pytest.fixture(scope="module")
def slow_config(make_config, hasty_standins):
    """A build of 4,500 shards, which lasts longer than slots need to notice a dead flow."""
    shards = ("shards.groups_per_shard=1", "shards.groups_per_batch=1")
    return make_config(hasty_standins, "mixing.groups_per_pair=100", "generator.steps=40", *shards)


def children(*words: str) -> list[psutil.Process]:
    return below(os.getpid(), *words)


def workers(root: Root) -> list[psutil.Process]:
    """The processes that make shards of this root."""
    return children("semix.pipeline.worker", root.url)


def num_committed(root: Root) -> int:
    return len(list(Path(root.url).glob("shards/*/*[0-9].json")))


@contextmanager
def killed(root: Root, victims: Callable[[], list[psutil.Process]]) -> Iterator[list[int]]:
    """Kill one victim once the first shard is committed; yields the list of killed pids."""
    dead: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not dead and not over.wait(0.02):
            if running := victims() if num_committed(root) else []:
                dead.append(running[0].pid)
                running[0].kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield dead
    finally:
        over.set()
        thread.join(60)


@pytest.mark.parametrize(
    "runner", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("local", "ray")), "dask"]
)
@pytest.mark.timeout(600)
def test_a_build_with_a_killed_worker_ends_as_a_quiet_one(
    runner, started, built, ended_tasks, capfd
):
    with killed(started, lambda: workers(started)) as dead:
        end = make(started.url, SlotSettings(2, runner=runner, device="cpu"))
    assert len(dead) == 1
    assert end["errors"] == []
    assert contents(started) == contents(built)
    # Killed before a commit, the shard is made twice; after it, the line that counts it is lost.
    assert abs(sum(result["made"] for result in end["results"]) - SHARDS) <= 1
    assert started.store.list("leases") == []
    assert workers(started) == []
    tasks = ended_tasks(end["run"], 2)  # of the one server, wherever they ran
    assert sorted(tasks) == ["generate slot 0", "generate slot 1"]
    assert all(task.state.is_completed() for task in tasks.values())
    lines = "".join(capfd.readouterr()).splitlines()
    assert [line for line in lines if "| INFO    |" not in line] == []  # those are Prefect's
    assert children("ray") == children("spawn_main") == []


# On an existing cluster the flow's slots live in processes that outlive the flow.


@contextmanager
def dask_cluster() -> Iterator[str]:
    from distributed import LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    gpu = {"CUDA_VISIBLE_DEVICES": "7"}  # there need not be one
    with LocalCluster(host="127.0.0.1", env=gpu, **options) as cluster:
        yield cluster.scheduler_address


@contextmanager
def ray_cluster() -> Iterator[str]:
    import ray

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    command += [f"--port={port}", "--num-cpus=4", "--num-gpus=2"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]  # there need not be GPUs
    paths = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(
        command, env=environment, stdout=PIPE, stderr=STDOUT, text=True
    ) as process:
        while "Ray runtime started" not in (line := process.stdout.readline()):
            assert line, "ray did not start"
        try:
            yield f"{ray.util.get_node_ip_address()}:{port}"
        finally:
            process.terminate()


@pytest.fixture
def ray_token(monkeypatch):
    """Ray's clusters ask for the token in the home folder, which is made where there is none."""
    ray = str(Path(sys.executable).parent / "ray")
    subprocess.run([ray, "get-auth-token", "--generate"], check=True, stdout=subprocess.DEVNULL)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


CLUSTERS = {"dask": dask_cluster, "ray": ray_cluster}


def supervisors(root: Root) -> list[psutil.Process]:
    """The cluster's processes in which slots of this root run."""
    return [parent for worker in workers(root) if (parent := worker.parent())]


@contextmanager
def gpus_seen(root: Root) -> Iterator[set[str | None]]:
    """A set that gets the values of CUDA_VISIBLE_DEVICES of the root's workers."""
    values: set[str | None] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for worker in workers(root):
                with suppress(psutil.Error):
                    values.add(worker.environ().get("CUDA_VISIBLE_DEVICES"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield values
    finally:
        over.set()
        thread.join(60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_an_existing_cluster_survives_the_death_of_one_of_its_processes(
    runner, started, built, prefect_api, ray_token
):
    with CLUSTERS[runner]() as address:
        settings = SlotSettings(runner=runner, cluster=address, device="cpu")
        with gpus_seen(started) as gpus:  # which a slot that has one does not go on without
            errors = make(started.url, replace(settings, device="auto"))["errors"]
        assert len(errors) == 2  # one slot a Dask worker or a GPU of Ray's
        for error in errors:
            assert "its worker ended: exit status 78" in error
            assert "device = cuda: torch sees no GPU here" in error
        with killed(started, lambda: supervisors(started)) as dead:
            end = make(started.url, settings)
        assert len(dead) == 1
        assert end["errors"] == []
        assert contents(started) == contents(built)
        assert make(started.url, settings)["errors"] == []  # the cluster is there still
    assert gpus == ({"0", "1"} if runner == "ray" else {"7"})
    assert started.store.list("leases") == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_slots_elsewhere_end_with_their_flow_however_it_ends(
    runner, slow_config, prefect_api, ray_token, tmp_path, until
):
    root = create_root(slow_config, str(tmp_path / "mixed"))
    ensure_prototypes(build_of(root), device="cpu")
    with CLUSTERS[runner]() as address:
        settings = SlotSettings(runner=runner, cluster=address, device="cpu")
        with pytest.raises(ValueError, match="enough"):
            make.with_options(name="left")(root.url, settings, enough=1)
        assert workers(root) == []
        script = "from semix.flows.slots import SlotSettings\n"
        script += "from tests.flows.test_runners import make\n"
        script += f"make({root.url!r}, {settings!r})"
        paths = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
        driver = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": paths, "PREFECT_API_URL": prefect_api},
        )
        until(lambda: workers(root), timeout_s=300)
        driver.kill()
        driver.wait()
        until(lambda: not workers(root), timeout_s=LEASE_TIMEOUT_S + 60)
        assert root.missing()


def test_slots_of_a_dask_cluster_of_our_own_have_a_gpu_each(started, prefect_api, monkeypatch):
    from semix.flows.slots.dask import dask_slots

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with dask_slots(SlotSettings(3, runner="dask"), started.url) as slots:
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in slots.environments] == [
            "4",
            "7",
            "4",
        ]


@pytest.mark.parametrize(
    ("runner", "scheme", "named"),
    [
        ("dask", "tcp://", "no Dask scheduler"),
        ("ray", "ray://", "no Ray cluster"),
        ("ray", "", "no Ray cluster"),
    ],
)
def test_what_listens_and_is_no_cluster_is_named(
    runner, scheme, named, started, prefect_api, monkeypatch
):
    monkeypatch.setattr(f"semix.flows.slots.{runner}.CONNECT_S", 2)
    with create_server(("127.0.0.1", 0)) as listener:
        address = f"{scheme}127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(InputError, match=f"cluster = {address}: {named} answers there"):
            make(started.url, SlotSettings(runner=runner, cluster=address))
    assert started.store.list("leases") == []
