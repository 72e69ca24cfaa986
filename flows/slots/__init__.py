"""Slots: each is a task run that supervises one worker process at a time, here or on a cluster.

`slot` defines one slot and how it ends; `running` starts a flow's slots, on threads of this process
or by `dask` or `ray` as tasks of a cluster, and follows them. This module holds their settings, the
checks before anything starts, and the environment of workers on this machine.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from socket import SOCK_STREAM, create_connection, getaddrinfo, socket

from semix.data.errors import InputError
from semix.data.installation import install_command
from semix.data.machine import usable_cores
from semix.data.ranges import parse_partition
from semix.flows.child import start_ahead
from semix.flows.gpus import VISIBLE_DEVICES, settled_device, visible_gpus
from semix.flows.server_probe import prefect_settings

MAX_SLOTS = 190  # a flow has at most 200 task runs; a burst of thousands loses task state
LOCAL = "local"
PACKAGES = {"dask": "prefect_dask", "ray": "prefect_ray"}  # each an extra of that name
RUNNERS = (LOCAL, *PACKAGES)
DEVICES = ("auto", "cpu", "cuda")
AUTO = "auto"  # the Ray cluster that this machine belongs to
ADDRESSES = {"dask": "tcp://HOST:8786", "ray": "ray://HOST:10001, or auto"}
CONNECT_S = 10.0
# This module imports everything that a worker needs: torch, the libraries of all model families.
IMPORTS = ("semix.pipeline.shard",)
QUIET = {"TQDM_DISABLE": "1"}  # in a worker's environment: no progress bars in its log


@dataclass(frozen=True)
class SlotSettings:
    """How many slots a run has, and where.

    Attributes:
        count: worker processes; 0 means one per visible GPU, or one; on an existing cluster, one
            per Dask worker, Ray GPU or Ray CPU.
        runner: local, dask or ray.
        cluster: address of an existing cluster; empty to start one for the run.
        range: range of the shards to begin with, as `1/4`; empty for all.
        device: auto, cpu or cuda; cuda requires a GPU.
    """

    count: int = 0
    runner: str = LOCAL
    cluster: str = ""
    range: str = ""
    device: str = "auto"

    @property
    def on_this_machine(self) -> bool:
        """Whether all slots are on this machine, started by this run."""
        return not self.cluster

    @property
    def flow_device(self) -> str:
        """Device of the flow's own process; slots on a cluster may have GPUs that it lacks."""
        if self.on_this_machine:
            return settled_device(self.device)
        return "cpu" if self.device == "cpu" else "auto"


# Checks before anything starts


def check_slots(settings: SlotSettings) -> None:
    """Check all that can be checked before anything starts.

    Raises:
        InputError: an impossible setting, an extra that is not installed, a missing GPU, a driver
            that does not work, or a cluster that does not answer or cannot reach the Prefect
            server.
    """
    if not 0 <= settings.count <= MAX_SLOTS:
        remedy = f"0 to {MAX_SLOTS}; to use more, give each machine a part, with --range i/n"
        raise InputError("slots", settings.count, remedy)
    _check_choice("runner", settings.runner, RUNNERS)
    _check_choice("device", settings.device, DEVICES)
    parse_partition(settings.range)
    _check_runner(settings)
    check_gpu(settings)
    if settings.cluster:  # its other machines are checked once we are connected
        check_server_reachable(settings.cluster, [settings.cluster])
        _check_cluster_port(settings)


def check_gpu(settings: SlotSettings) -> None:
    """Check that a required GPU is there, even if there is nothing to do.

    Raises:
        InputError: cuda is set and there is no GPU, or the driver does not work.
    """
    gpus = visible_gpus() if settings.on_this_machine and settings.device != "cpu" else []
    if settings.on_this_machine and settings.device == "cuda" and not gpus:
        remedy = "no GPU is visible on this machine; use cpu, or run where nvidia-smi lists one"
        raise InputError("device", settings.device, remedy)


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(field, value, f"is none of {', '.join(allowed)}")


def _check_runner(settings: SlotSettings) -> None:
    if settings.runner == LOCAL:
        if settings.cluster:
            remedy = "needs --runner dask or ray; local slots run on this machine"
            raise InputError("cluster", settings.cluster, remedy)
    elif find_spec(PACKAGES[settings.runner]) is None:
        remedy = f"is not installed; run {install_command(settings.runner)}"
        raise InputError("runner", settings.runner, remedy)


def _check_cluster_port(settings: SlotSettings) -> None:
    """Raise InputError if no program listens at the cluster's port; Ray would retry for minutes."""
    port = re.search(r":(\d+)$", settings.cluster)
    if port is None:
        return
    try:
        create_connection((_host(settings.cluster), int(port[1])), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        remedy = f"nothing answers there ({error}); write {ADDRESSES[settings.runner]}"
        raise InputError("cluster", settings.cluster, remedy) from None


def is_here(address: str) -> bool:
    """Whether tcp://HOST:PORT, ray://HOST:PORT, HOST:PORT, HOST or AUTO is this machine."""
    if address == AUTO:
        return True
    try:
        addresses = getaddrinfo(_host(address), 0, type=SOCK_STREAM)
        for family, kind, protocol, _, endpoint in addresses:
            with socket(family, kind, protocol) as probe:
                probe.bind(endpoint)  # only an address of this machine can be bound
    except OSError:
        return False
    return True


def _host(address: str) -> str:
    host = re.sub(r"^[a-z]+://", "", address)
    return re.sub(r":\d+$", "", host).strip("[]")


def check_server_reachable(cluster: str, machines: Iterable[str]) -> None:
    """Raise InputError if a machine is another one and the Prefect server is on our loopback."""
    if all(is_here(machine) for machine in machines):
        return
    server = prefect_settings().api.url or ""
    host = _host(server.partition("://")[2].partition("/")[0])
    if host in ("", "localhost", "::1") or host.startswith("127."):
        remedy = (
            "its machines cannot reach a Prefect server on this machine's loopback; set "
            "PREFECT_API_URL to a server that they can reach"
        )
        raise InputError("cluster", cluster, remedy)


# Workers on this machine: their GPUs, their cores, and their start in advance


def environments_here(settings: SlotSettings) -> list[dict[str, str]]:
    """The environment of each slot here: `count` slots, or one per visible GPU, or one."""
    gpus = [] if settings.device == "cpu" else visible_gpus()
    count = settings.count or min(len(gpus), MAX_SLOTS) or 1
    common = QUIET | shared_threads(count)
    return [common | own_gpu(slot, gpus) for slot in range(count)]


def shared_threads(count: int) -> dict[str, str]:
    """Thread settings of `count` workers, which together use no more threads than our cores.

    A few threads more would make them ten times slower, not a few per cent.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // count))
    return {"OMP_NUM_THREADS": threads}


def own_gpu(slot: int, gpus: Sequence[str]) -> dict[str, str]:
    """The setting of a slot's GPU; slots beyond the number of GPUs share them in turn."""
    return {VISIBLE_DEVICES: gpus[slot % len(gpus)]} if gpus else {}


@contextmanager
def prepare_workers(settings: SlotSettings, *, builds: int = 1, url: str = "") -> Iterator[None]:
    """Start workers, which import their libraries now; slots here use them during the block.

    Args:
        builds: number of builds that begin during the block, each with these slots.
        url: URL of the root, for people who list processes.
    """
    if settings.runner != LOCAL:
        yield
        return
    environments = builds * environments_here(settings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with start_ahead(IMPORTS, environments, ps_arguments=("semix.pipeline.worker", url), **pipes):
        yield
