"""Slots as tasks of a Dask cluster: an existing one, or one of this machine for the run."""

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from distributed import Security
from distributed.comm import connect
from prefect_dask import DaskTaskRunner

from semix.data.errors import InputError
from semix.flows.slots import (
    ADDRESSES,
    MAX_SLOTS,
    QUIET,
    SlotSettings,
    check_server_reachable,
    environments_here,
)
from semix.flows.slots.slot import SlotPool, run_lease

CONNECT_S = 30.0


@contextmanager
def dask_slots(settings: SlotSettings, url: str) -> Iterator[SlotPool]:
    """Slots on Dask: by default one per worker of an existing cluster, or as many as without Dask.

    On an existing cluster, the environment of each worker names its GPU, as dask-cuda sets it.

    Raises:
        InputError: no cluster answers, or it has no workers.
    """
    for name in ("distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # our own log lines suffice
    local_environments = [] if settings.cluster else environments_here(settings)
    with (
        tempfile.TemporaryDirectory(prefix="semix-dask-") as folder,
        run_lease(url) as (stop, end),
        _runner(settings.cluster, len(local_environments), folder) as runner,
    ):
        workers = _workers(runner, settings.cluster)
        environments = local_environments or [QUIET] * (settings.count or min(workers, MAX_SLOTS))
        yield SlotPool(runner.submit, environments, stop, end)


def _runner(cluster: str, workers: int, folder: str) -> DaskTaskRunner:
    if cluster:
        _require_scheduler(cluster)
        return DaskTaskRunner(address=cluster, client_kwargs={"timeout": CONNECT_S})
    options = {
        "n_workers": workers,
        "threads_per_worker": 1,  # one slot each
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "security": True,  # TLS with keys of this run only, as any client may run code
        "memory_limit": 0,  # a limit would count the supervising process, not our worker
        "local_directory": folder,
        "silence_logs": logging.CRITICAL,
    }
    return DaskTaskRunner(cluster_kwargs=options)


def _require_scheduler(cluster: str) -> None:
    """Raise InputError if no scheduler answers, for which Dask's client would wait for ever."""

    async def greet() -> None:
        arguments = Security().get_connection_args("client")
        (await connect(cluster, timeout=CONNECT_S, **arguments)).abort()

    with ThreadPoolExecutor(1) as thread:  # a notebook's main thread has an event loop already
        try:
            thread.submit(asyncio.run, asyncio.wait_for(greet(), CONNECT_S)).result()
        except (OSError, TypeError, ValueError) as error:
            reason = str(error) or "it says nothing"
            remedy = f"no Dask scheduler answers there ({reason}); write {ADDRESSES['dask']}"
            raise InputError("cluster", cluster, remedy) from None


def _workers(runner: DaskTaskRunner, cluster: str) -> int:
    workers = list(runner.client.nthreads())  # addresses of the workers
    if not workers:
        remedy = "this Dask cluster has no workers; start some with `dask worker`"
        raise InputError("cluster", cluster, remedy)
    if cluster:
        check_server_reachable(cluster, workers)
    return len(workers)
