"""What all flows share: version, names, tags, logging, cancelling."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

from prefect import get_client, runtime
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.states import Cancelled, Crashed
from prefect.utilities.urls import url_for

from semix.data.installation import DISTRIBUTION
from semix.flows.artifacts import best_effort_display
from semix.flows.failures import RunCancelled
from semix.flows.paths import check_places
from semix.flows.run_server import is_own_server

TAG = "semix"
LOOK_EVERY_S = 5.0  # between two checks for a cancelled run

log = logging.getLogger("semix.prefect")

_active: list[UUID] = []  # flow runs of this process, the innermost last


def flow_options(kind: str, run_name: Callable[[Mapping[str, Any]], str]) -> dict[str, Any]:
    """Options of the flow `semix-KIND`.

    Args:
        run_name: makes a readable name of a run from its parameters.
    """
    return {
        "name": f"semix-{kind}",
        "version": version(DISTRIBUTION),
        "flow_run_name": lambda: run_name(runtime.flow_run.parameters),
        "persist_result": False,
        "result_serializer": "json",
    }


def mark_cancelled(error: RunCancelled) -> None:
    """Set a run's state to cancelled, whatever state the server recorded before."""
    with suppress(Exception), get_client(sync_client=True) as client:
        client.set_flow_run_state(error.run, Cancelled(message=str(error)), force=True)


def base_name(location: str) -> str:
    """The last part of a path or URL."""
    return PurePosixPath(location).name or location


@contextmanager
def run_context(kind: str) -> Iterator[None]:
    """The context of a flow's body: tags the run, sends our log lines to it, ends it if cancelled.

    Raises:
        InputError: a deployment's run was given a relative path.
        RunCancelled: a run without a deployment was cancelled; a worker ends those of deployments.
    """
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "only in a flow"
    run = context.flow_run
    with _log_to_run(run.id):
        if run.deployment_id is not None:
            check_places(context.parameters or {})
        # Only the run is tagged: a task with tags asks the server for their limits when it begins,
        # so it could not begin without a server.
        with best_effort_display(), get_client(sync_client=True) as client:
            client.update_flow_run(run.id, tags=sorted({*run.tags, TAG, kind}))
            if run.run_count > 1:
                _end_lost_tasks(client, run.id)
        outermost = run.deployment_id is None and run.parent_task_run_id is None
        if outermost and not is_own_server():
            log.info("this run in Prefect: %s", url_for(run))
        with _end_on_cancel(run.id) if outermost else nullcontext():
            yield


def _end_lost_tasks(client: SyncPrefectClient, run: UUID) -> None:
    """Mark task runs of a dead attempt as crashed; else they would run for ever in Prefect."""
    unfinished = TaskRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
    for task_run in client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])),
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=unfinished)),
    ):
        state: State[Any] = Crashed(
            message="its flow's process has ended; the run goes on in another one"
        )
        client.set_task_run_state(task_run.id, state, force=True)


@contextmanager
def _end_on_cancel(run: UUID) -> Iterator[None]:
    """End the block when the run is cancelled in Prefect, which itself ends only deployments' runs.

    SIGTERM interrupts whatever the main thread waits for; a flow on another thread goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    block_ended, cancelled = threading.Event(), threading.Event()

    def watch() -> None:
        while not block_ended.wait(LOOK_EVERY_S):
            if _is_cancelled(run) and not block_ended.is_set():
                cancelled.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return

    watcher = threading.Thread(target=copy_context().run, args=(watch,), daemon=True)
    watcher.start()
    try:
        yield
    except TerminationSignal:  # raised by the handler that Prefect has for a flow
        if not cancelled.is_set():
            raise
        text = "cancelled in Prefect; committed work stays, and the same command goes on"
        raise RunCancelled(text, run) from None
    finally:
        block_ended.set()


def _is_cancelled(run: UUID) -> bool:
    """Whether the run is cancelled or about to be; False if the server does not answer."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
    except Exception:
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


class RunLog(logging.Handler):
    """Sends log lines of `semix` to the log of the current run.

    Lines from threads without a run, as threads that read a store, go to the innermost run.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._prefect = APILogHandler()

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "sent_to_prefect", False):  # a longer version was sent already
            return
        if FlowRunContext.get() is None and TaskRunContext.get() is None:
            record.flow_run_id = _active[-1]
        self._prefect.emit(record)


_run_log = RunLog()


def is_logged() -> bool:
    """Whether log lines of `semix` in this process go to the log of a run."""
    return bool(_active)


@contextmanager
def _log_to_run(run: UUID) -> Iterator[None]:
    logger = logging.getLogger("semix")
    if logger.level == logging.NOTSET:  # a worker, which does not run our command line
        logger.setLevel(logging.INFO)
    _active.append(run)
    logger.addHandler(_run_log)  # no effect if an outer flow has added it
    try:
        yield
    finally:
        _active.remove(run)
        if not _active:
            logger.removeHandler(_run_log)
