"""What all flows share: version, names, tags, how they are logged and cancelled."""

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
from semix.flows.artifacts import only_shown
from semix.flows.failures import RunCancelled
from semix.flows.paths import check_places
from semix.flows.run_server import is_ours

TAG = "semix"
LOOK_EVERY_S = 5.0  # whether a run was cancelled

log = logging.getLogger("semix.prefect")

_active: list[UUID] = []  # flow runs of this process, the innermost last


def flow_options(kind: str, run_name: Callable[[Mapping[str, Any]], str]) -> dict[str, Any]:
    """Options of the flow `semix-KIND`.

    Args:
        run_name: from a run's parameters to its name, which a person recognises.
    """
    return {
        "name": f"semix-{kind}",
        "version": version(DISTRIBUTION),
        "flow_run_name": lambda: run_name(runtime.flow_run.parameters),
        "persist_result": False,
        "result_serializer": "json",
    }


def note_cancelled(error: RunCancelled) -> None:
    """Whatever the server noted before, as that the run failed."""
    with suppress(Exception), get_client(sync_client=True) as client:
        client.set_flow_run_state(error.run, Cancelled(message=str(error)), force=True)


def name_of(place: str) -> str:
    """The last part of a path or URL."""
    return PurePosixPath(place).name or place


@contextmanager
def running(kind: str) -> Iterator[None]:
    """For the body of a flow: tags on the run, our lines in the run's log.

    Raises:
        InputError: a deployment's run was given a relative path.
        RunCancelled: in Prefect, of a run that no deployment began; its worker ends others.
    """
    found = FlowRunContext.get()
    assert found is not None and found.flow_run is not None, "only in a flow"
    run = found.flow_run
    with _logged(run.id):
        if run.deployment_id is not None:
            check_places(found.parameters or {})
        # The run alone: a task that has tags asks the server for their limits when it begins, so it
        # could not begin without one.
        with only_shown(), get_client(sync_client=True) as client:
            client.update_flow_run(run.id, tags=sorted({*run.tags, TAG, kind}))
            if run.run_count > 1:
                _end_lost_tasks(client, run.id)
        outermost = run.deployment_id is None and run.parent_task_run_id is None
        if outermost and not is_ours():
            log.info("this run in Prefect: %s", url_for(run))
        with _cancellable(run.id) if outermost else nullcontext():
            yield


def _end_lost_tasks(client: SyncPrefectClient, run: UUID) -> None:
    """Those of an attempt that died would be shown as running for ever."""
    begun = TaskRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
    for lost in client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])),
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=begun)),
    ):
        state: State[Any] = Crashed(
            message="its flow's process is gone; the run goes on in another one"
        )
        client.set_task_run_state(lost.id, state, force=True)


@contextmanager
def _cancellable(run: UUID) -> Iterator[None]:
    """End the block when the run is cancelled in Prefect, which itself ends deployments' runs only.

    SIGTERM interrupts whatever the main thread waits for; a flow on another thread goes on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, cancelled = threading.Event(), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            if _is_cancelled(run) and not over.is_set():
                cancelled.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return

    looking = threading.Thread(target=copy_context().run, args=(look,), daemon=True)
    looking.start()
    try:
        yield
    except TerminationSignal:  # raised by the handler that Prefect has for a flow
        if not cancelled.is_set():
            raise
        text = "cancelled in Prefect; what was committed stays, and the same command goes on"
        raise RunCancelled(text, run) from None
    finally:
        over.set()


def _is_cancelled(run: UUID) -> bool:
    """What a server that does not answer says nothing of."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
    except Exception:
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


class RunLog(logging.Handler):
    """Hands lines of `semix` to the log of the run that says them.

    Threads that know of no run, as those that read a store, speak for the innermost one.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._prefect = APILogHandler()

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "told_prefect", False):  # at more length
            return
        if FlowRunContext.get() is None and TaskRunContext.get() is None:
            record.flow_run_id = _active[-1]
        self._prefect.emit(record)


_run_log = RunLog()


def is_logged() -> bool:
    """Whether what `semix` logs in this process goes to the log of a run."""
    return bool(_active)


@contextmanager
def _logged(run: UUID) -> Iterator[None]:
    logger = logging.getLogger("semix")
    if logger.level == logging.NOTSET:  # a worker, without our command line
        logger.setLevel(logging.INFO)
    _active.append(run)
    logger.addHandler(_run_log)  # once, however many flows are within each other
    try:
        yield
    finally:
        _active.remove(run)
        if not _active:
            logger.removeHandler(_run_log)
