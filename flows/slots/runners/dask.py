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

from data.errors import InputError
from flows.gpus import visible_gpus
from flows.slots.run_lease import run_lease
from flows.slots.runners.place import Place
from flows.slots.settings import (
    ADDRESSES,
    MOST_SLOTS,
    SlotSettings,
    refuse_unreachable_server,
    slots_here,
)
from flows.slots.workers_here import own_gpu, quiet, shared_threads

CONNECT_S = 30.0


@contextmanager
def dask_slots(settings: SlotSettings, url: str) -> Iterator[Place]:
    """By default one a worker of an existing cluster; else as many as local slots.

    The environment of an existing cluster's workers says which GPU is their own, as dask-cuda
    sets it.

    Raises:
        InputError: no cluster answers, or it has no workers.
    """
    for name in ("distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the run's own lines say enough
    with (
        tempfile.TemporaryDirectory(prefix="semix-dask-") as folder,
        run_lease(url) as lease,
        _runner(settings, folder) as runner,
    ):
        workers = _workers(runner, settings)
        count = settings.count or min(workers, MOST_SLOTS)
        common = quiet() | ({} if settings.cluster else shared_threads(count))
        gpus = [] if settings.cluster or settings.device == "cpu" else visible_gpus()

        def environment(slot: int) -> dict[str, str]:
            return common | own_gpu(slot, gpus)

        yield Place(runner.submit, count, environment, lease.stop, lease.end)


def _runner(settings: SlotSettings, folder: str) -> DaskTaskRunner:
    if settings.cluster:
        _require_scheduler(settings.cluster)
        return DaskTaskRunner(address=settings.cluster, client_kwargs={"timeout": CONNECT_S})
    own = {
        "n_workers": slots_here(settings),
        "threads_per_worker": 1,  # a slot each
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "security": True,  # TLS with keys of this run alone: any client may run code
        "memory_limit": 0,  # that of the process which supervises; ours is its child
        "local_directory": folder,
        "silence_logs": logging.CRITICAL,
    }
    return DaskTaskRunner(cluster_kwargs=own)


def _require_scheduler(cluster: str) -> None:
    """Raises InputError: what listens there is none. Dask's client waits for its word for ever."""

    async def greet() -> None:
        own = Security().get_connection_args("client")
        (await connect(cluster, timeout=CONNECT_S, **own)).abort()

    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a loop already
        try:
            thread.submit(asyncio.run, asyncio.wait_for(greet(), CONNECT_S)).result()
        except (OSError, TypeError, ValueError) as error:
            reason = str(error) or "it says nothing"
            remedy = f"no Dask scheduler answers there ({reason}); write {ADDRESSES['dask']}"
            raise InputError("cluster", cluster, remedy) from None


def _workers(runner: DaskTaskRunner, settings: SlotSettings) -> int:
    workers = list(runner.client.nthreads())  # their addresses
    if not workers:
        remedy = "this Dask cluster has no workers; start some with `dask worker`"
        raise InputError("cluster", settings.cluster, remedy)
    if settings.cluster:
        refuse_unreachable_server(settings.cluster, workers)
    return len(workers)
