"""How a plain function runs its flow, and what becomes of it when Prefect's server is lost."""

from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any, TypeVar

from semix.data.errors import InputError
from semix.flows.failures import RunCancelled, RunFailed, ServerLost
from semix.flows.run_server import how_ours_ended, prefect_server, send_rest
from semix.flows.server_probe import what_was_lost

Kind = TypeVar("Kind")

_handed: ContextVar[object] = ContextVar("handed", default=None)


def all_that_was_made() -> str:
    return "what was made stays, and the same command goes on"


def run_flow(
    entrypoint: str,
    kept: Callable[[], str] = all_that_was_made,
    *,
    ready: object = None,
    **parameters: Any,
) -> Any:
    """What a flow's function returns or raises, run here with a server.

    Prefect is imported beside the server's start, and here alone: it costs seconds, which help,
    refusals and runs with nothing to do need not spend.

    Args:
        entrypoint: as in prefect.yaml: `semix.flows.train_flow.train_flow`.
        kept: says what is safe of a run that lost its server, and which command goes on.
        ready: what was opened and checked for the flow, which takes it by `handed`.
    Raises:
        InputError: the configured server cannot be used.
        ServerLost: Prefect could not be told of the run, or of its end.
    """
    module, _, name = entrypoint.rpartition(".")
    token = _handed.set(ready)
    try:
        with prefect_server(wait=False):
            flow = getattr(import_module(module), name)
            with prefect_server() as url:
                return call_flow(flow, url, kept, **parameters)
    finally:
        _handed.reset(token)


def handed(kind: type[Kind]) -> Kind | None:
    """What the caller of this flow made ready; None for a deployment's run."""
    found = _handed.get()
    return found if isinstance(found, kind) else None


def call_flow(
    flow: Callable[..., Any], url: str, kept: Callable[[], str], /, **parameters: Any
) -> Any:
    """As `run_flow`, of a flow, with the server at `url`.

    Workers and tasks ask no server, and Prefect's client tries again for a while: a server that is
    started again meanwhile costs nothing.
    """
    try:
        return flow(**parameters)
    except RunCancelled as error:
        from semix.flows.flow_runs import note_cancelled  # Prefect is loaded, as there is a flow

        note_cancelled(error)
        raise
    except BaseException as error:  # Prefect's refusals are no exceptions
        lost = what_was_lost(error, url, ours=how_ours_ended(url))
        if not lost:
            raise
        send_rest(0.0)  # else a later run's states and lines would be sent there, too
        if (own := _own_end(error)) is not None:
            raise own from None
        raise ServerLost(f"{lost}; {kept()}") from error


def _own_end(error: BaseException | None) -> BaseException | None:
    """How the flow's function had ended when its server was found lost, if not well."""
    ends = (RunFailed, InputError, KeyboardInterrupt, SystemExit)
    while error is not None and not isinstance(error, ends):
        error = error.__cause__ or error.__context__
    return error
