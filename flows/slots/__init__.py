"""Slots: a task run each, one worker process after another, on this machine or a cluster.

What a place for slots is, how a slot works there and how it ends is told in `slot`; `running`
starts a flow's slots, on threads here, or by `dask` or `ray` as tasks of a cluster, and follows
them. Here: where they shall be, checked before anything starts, and what workers of this machine
share.
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
from semix.flows.child import started_ahead
from semix.flows.gpus import CHOSEN, settled_device, visible_gpus
from semix.flows.server_probe import settings_here

MOST_SLOTS = 190  # a flow has at most 200 task runs; a burst of thousands loses task state
LOCAL = "local"
PACKAGES = {"dask": "prefect_dask", "ray": "prefect_ray"}  # each an extra of that name
RUNNERS = (LOCAL, *PACKAGES)
DEVICES = ("auto", "cpu", "cuda")
AUTO = "auto"  # the Ray cluster that this machine belongs to
ADDRESSES = {"dask": "tcp://HOST:8786", "ray": "ray://HOST:10001, or auto"}
CONNECT_S = 10.0
# What a worker imports, sooner or later: with it torch, the models' libraries, all families.
IMPORTS = ("semix.pipeline.shard",)
QUIET = {"TQDM_DISABLE": "1"}  # a worker's environment: no bars as lines in a log


@dataclass(frozen=True)
class SlotSettings:
    """Where the slots of a run are.

    Attributes:
        count: worker processes; 0 is one a visible GPU or one, and on an existing cluster one a
            Dask worker, Ray GPU or Ray CPU.
        runner: local, dask or ray.
        cluster: address of an existing one; empty for one that is started for the run.
        range: which part of the shards to begin with, as `1/4`; empty for the whole.
        device: auto, cpu or cuda; cuda demands a GPU.
    """

    count: int = 0
    runner: str = LOCAL
    cluster: str = ""
    range: str = ""
    device: str = "auto"

    @property
    def here(self) -> bool:
        """Whether all slots are on this machine, started by this run."""
        return not self.cluster

    @property
    def flow_device(self) -> str:
        """What the flow's own process uses; slots on a cluster may have GPUs that it has not."""
        if self.here:
            return settled_device(self.device)
        return "cpu" if self.device == "cpu" else "auto"


# What can be refused before anything starts


def check_slots(settings: SlotSettings) -> None:
    """All that is known before anything starts.

    Raises:
        InputError: what cannot be, an extra that is not installed, a GPU that is not here, a
            driver that does not work, or a cluster that does not answer or would not reach the
            Prefect server.
    """
    if not 0 <= settings.count <= MOST_SLOTS:
        remedy = f"0 to {MOST_SLOTS}; more machines take a part each, with --range i/n"
        raise InputError("slots", settings.count, remedy)
    _one_of("runner", settings.runner, RUNNERS)
    _one_of("device", settings.device, DEVICES)
    parse_partition(settings.range)
    _check_runner(settings)
    check_gpu(settings)
    if settings.cluster:  # its other machines are looked at once it is reached
        refuse_unreachable_server(settings.cluster, [settings.cluster])
        _refuse_silence(settings)


def check_gpu(settings: SlotSettings) -> None:
    """Whatever is left to do: cuda demands a GPU, and a driver that is there must work.

    Raises:
        InputError: there is none on this machine, or the driver does not work.
    """
    gpus = visible_gpus() if settings.here and settings.device != "cpu" else []
    if settings.here and settings.device == "cuda" and not gpus:
        remedy = "no GPU is visible on this machine; use cpu, or run where nvidia-smi lists one"
        raise InputError("device", settings.device, remedy)


def _one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(field, value, f"is none of {', '.join(known)}")


def _check_runner(settings: SlotSettings) -> None:
    if settings.runner == LOCAL:
        if settings.cluster:
            remedy = "needs --runner dask or ray; local slots are on this machine"
            raise InputError("cluster", settings.cluster, remedy)
    elif find_spec(PACKAGES[settings.runner]) is None:
        remedy = f"is not installed; run {install_command(settings.runner)}"
        raise InputError("runner", settings.runner, remedy)


def _refuse_silence(settings: SlotSettings) -> None:
    """Ray itself would go on asking for minutes."""
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
        found = getaddrinfo(_host(address), 0, type=SOCK_STREAM)
        for family, kind, protocol, _, place in found:
            with socket(family, kind, protocol) as probe:
                probe.bind(place)  # only an address of this machine can be taken
    except OSError:
        return False
    return True


def _host(address: str) -> str:
    host = re.sub(r"^[a-z]+://", "", address)
    return re.sub(r":\d+$", "", host).strip("[]")


def refuse_unreachable_server(cluster: str, machines: Iterable[str]) -> None:
    """Raises InputError if one of these is elsewhere, and the Prefect server on our loopback."""
    if all(is_here(machine) for machine in machines):
        return
    server = settings_here().api.url or ""
    host = _host(server.partition("://")[2].partition("/")[0])
    if host in ("", "localhost", "::1") or host.startswith("127."):
        remedy = (
            "its machines cannot reach a Prefect server on this machine's loopback; set "
            "PREFECT_API_URL to one that they reach"
        )
        raise InputError("cluster", cluster, remedy)


# Workers of this machine: each its GPU and its share of the cores, started ahead


def environments_here(settings: SlotSettings) -> list[dict[str, str]]:
    """Of each slot of this machine: as many as were asked for, else one a visible GPU, or one."""
    gpus = [] if settings.device == "cpu" else visible_gpus()
    count = settings.count or min(len(gpus), MOST_SLOTS) or 1
    common = QUIET | shared_threads(count)
    return [common | own_gpu(slot, gpus) for slot in range(count)]


def shared_threads(count: int) -> dict[str, str]:
    """For `count` workers of this machine: together no more threads than cores we may use.

    A few too many cost ten times, not a few per cent.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // count))
    return {"OMP_NUM_THREADS": threads}


def own_gpu(slot: int, gpus: Sequence[str]) -> dict[str, str]:
    """Slots take turns at the GPUs."""
    return {CHOSEN: gpus[slot % len(gpus)]} if gpus else {}


@contextmanager
def workers_ahead(settings: SlotSettings, *, builds: int = 1, url: str = "") -> Iterator[None]:
    """During the block, slots of this machine find their workers with all libraries imported.

    Args:
        builds: how many begin in the block, each with these slots.
        url: of the root, for whoever looks at processes.
    """
    if settings.runner != LOCAL:
        yield
        return
    environments = builds * environments_here(settings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started_ahead(IMPORTS, environments, shown=("semix.pipeline.worker", url), **pipes):
        yield
