"""Run a flow from a plain function, and report what stays when Prefect's server is lost."""

from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any, TypeVar

from semix.data.errors import InputError
from semix.flows.failures import RunCancelled, RunFailed, ServerLost
from semix.flows.run_server import flush_prefect, own_server_end, prefect_server
from semix.flows.server_probe import describe_loss

Kind = TypeVar("Kind")

_prepared: ContextVar[object] = ContextVar("prepared", default=None)


def default_resume_hint() -> str:
    return "finished work stays, and the same command goes on"


def run_flow(
    entrypoint: str,
    resume_hint: Callable[[], str] = default_resume_hint,
    *,
    prepared: object = None,
    **parameters: Any,
) -> Any:
    """Run a flow here, with a Prefect server; return or raise what the flow's function does.

    Prefect is imported only here, while the server starts: the import costs seconds, which help
    pages, refusals and runs with nothing to do need not spend.

    Args:
        entrypoint: as in prefect.yaml: `semix.flows.train_flow.train_flow`.
        resume_hint: says what is safe when the server is lost, and which command goes on.
        prepared: a value that was opened and checked for the flow, which gets it by `from_caller`.
    Raises:
        InputError: the configured server cannot be used.
        ServerLost: Prefect could not record the run or its end.
    """
    module, _, name = entrypoint.rpartition(".")
    token = _prepared.set(prepared)
    try:
        with prefect_server(wait=False):
            flow = getattr(import_module(module), name)
            with prefect_server() as url:
                return call_flow(flow, url, resume_hint, **parameters)
    finally:
        _prepared.reset(token)


def from_caller(kind: type[Kind]) -> Kind | None:
    """The value that the caller of this flow prepared; None for a deployment's run."""
    value = _prepared.get()
    return value if isinstance(value, kind) else None


def call_flow(
    flow: Callable[..., Any], url: str, resume_hint: Callable[[], str], /, **parameters: Any
) -> Any:
    """As `run_flow`, for an imported flow and with the server at `url`.

    Workers and tasks need no server, and Prefect's client retries for a while: a server that
    restarts meanwhile does no harm.
    """
    try:
        return flow(**parameters)
    except RunCancelled as error:
        from semix.flows.flow_runs import mark_cancelled  # Prefect is loaded, as there is a flow

        mark_cancelled(error)
        raise
    except BaseException as error:  # Prefect's Abort is no Exception
        loss = describe_loss(error, url, own_server_end=own_server_end(url))
        if not loss:
            raise
        flush_prefect(0.0)  # else states and log lines of a later run would be sent there, too
        if (flow_error := _flow_error(error)) is not None:
            raise flow_error from None
        raise ServerLost(f"{loss}; {resume_hint()}") from error


def _flow_error(error: BaseException | None) -> BaseException | None:
    """The error that ended the flow's function before the server was found to be lost, if any."""
    own_errors = (RunFailed, InputError, KeyboardInterrupt, SystemExit)
    while error is not None and not isinstance(error, own_errors):
        error = error.__cause__ or error.__context__
    return error
