"""Slots as tasks of a Ray cluster: an existing one, or one of this machine for the run."""

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import ray
from prefect.tasks import Task
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options

from semix.data.errors import InputError
from semix.flows.slots import (
    ADDRESSES,
    AUTO,
    MAX_SLOTS,
    QUIET,
    SlotSettings,
    check_server_reachable,
    environments_here,
    shared_threads,
)
from semix.flows.slots.slot import SlotFuture, SlotPool, SlotResult, run_lease

# Processes share only a few small records in memory; Ray's minimum is 75 MiB.
OBJECT_STORE = 100 * 2**20  # bytes
CONNECT_S = 30.0
SILENT = {"log_to_driver": False, "logging_level": logging.CRITICAL}


@contextmanager
def ray_slots(settings: SlotSettings, url: str) -> Iterator[SlotPool]:
    """Slots on Ray: by default one per GPU of the cluster, or one per CPU without GPUs.

    Ray assigns a GPU to each slot, and names it in the slot's environment. A cluster of this run's
    own has as many slots as a run without Ray.

    Raises:
        InputError: no cluster answers, or it cannot reach the Prefect server.
    """
    with run_lease(url) as (stop, end), _connected(settings) as runner:
        resources = ray.cluster_resources()
        gpus = 0 if settings.device == "cpu" else int(resources.get("GPU", 0))
        count = settings.count or min(gpus or int(resources.get("CPU", 1)), MAX_SLOTS)
        common = QUIET | ({} if settings.cluster else shared_threads(count))
        options: dict[str, Any] = {"num_gpus": 1} if gpus else {}

        def submit(task: Task[..., Any], parameters: dict[str, Any]) -> SlotFuture:
            with remote_options(scheduling_strategy="SPREAD", **options):
                return runner.submit(task, parameters)

        yield SlotPool(submit, [common] * count, stop, end)


@contextmanager
def _connected(settings: SlotSettings) -> Iterator["RayTaskRunner[SlotResult]"]:
    """Connect to the cluster; at the end disconnect, and stop it if it is our own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if re.search(r":\d+$", settings.cluster):
        _require_ray(settings.cluster)
    runner = _runner(settings)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        runner.__enter__()
    except (ConnectionError, RuntimeError, ValueError) as error:
        if not settings.cluster:
            raise
        first_line = (str(error).splitlines() or [""])[0]
        raise _no_cluster(settings.cluster, first_line) from None
    try:
        # Ray replaces the handler: on SIGTERM the process would end without our clean-up.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        if settings.cluster:
            nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
            check_server_reachable(settings.cluster, nodes)
        yield runner
    finally:
        runner.__exit__(None, None, None)
        ray.shutdown()  # the runner leaves connections to existing clusters open


def _require_ray(cluster: str) -> None:
    """Raise InputError if the program at that port is not Ray, which would retry for minutes.

    All of Ray's ports speak gRPC, which a dashboard or a Dask scheduler does not.
    """
    if os.environ.get("RAY_USE_TLS", "0") == "1":
        return  # only Ray can present the certificates
    address = re.sub(r"^[a-z]+://", "", cluster)
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(CONNECT_S)
        except grpc.FutureTimeoutError:
            raise _no_cluster(cluster, "what listens there does not speak gRPC") from None


def _no_cluster(cluster: str, reason: str) -> InputError:
    remedy = (
        f"no Ray cluster answers there ({reason}); write {ADDRESSES['ray']}; if it requires a "
        "token, set RAY_AUTH_MODE=token"
    )
    return InputError("cluster", cluster, remedy)


def _runner(settings: SlotSettings) -> "RayTaskRunner[SlotResult]":
    # Our own cluster also listens on all interfaces, to anyone with the token in ~/.ray.
    if settings.cluster == AUTO:
        return RayTaskRunner(init_kwargs={"address": AUTO, **SILENT})
    if settings.cluster:
        return RayTaskRunner(address=settings.cluster, init_kwargs=SILENT)
    options = {
        "num_cpus": len(environments_here(settings)),  # one slot each
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
    }
    return RayTaskRunner(address="local", init_kwargs=options | SILENT)
