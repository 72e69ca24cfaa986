"""What all flows share: version, names, tags, and their log in Prefect."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

from prefect import get_client, runtime
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from flows.artifacts.publishing import only_shown
from flows.places import check_places

TAG = "semix"

_active: list[UUID] = []  # flow runs of this process, the innermost last


def flow_options(kind: str, run_name: Callable[[Mapping[str, Any]], str]) -> dict[str, Any]:
    """Options of the flow `semix-KIND`.

    Args:
        run_name: from a run's parameters to its name, which a person recognises.
    """
    return {
        "name": f"semix-{kind}",
        "version": version("semix"),
        "flow_run_name": lambda: run_name(runtime.flow_run.parameters),
        "persist_result": False,
        "result_serializer": "json",
    }


def name_of(place: str) -> str:
    """The last part of a path or URL."""
    return PurePosixPath(place).name or place


@contextmanager
def running(kind: str) -> Iterator[None]:
    """For the body of a flow: tags on the run, our lines in the run's log.

    Raises:
        InputError: a deployment's run was given a relative path.
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
        yield


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
