"""How a plain function runs its flow, and what becomes of it when Prefect's server is lost."""

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
    return "what was made stays, and the same command goes on"


def run_flow(
    entrypoint: str,
    resume_hint: Callable[[], str] = default_resume_hint,
    *,
    prepared: object = None,
    **parameters: Any,
) -> Any:
    """What a flow's function returns or raises, run here with a server.

    Prefect is imported beside the server's start, and here alone: it costs seconds, which help,
    refusals and runs with nothing to do need not spend.

    Args:
        entrypoint: as in prefect.yaml: `semix.flows.train_flow.train_flow`.
        kept: says what is safe of a run that lost its server, and which command goes on.
        ready: what was opened and checked for the flow, which takes it by `from_caller`.
    Raises:
        InputError: the configured server cannot be used.
        ServerLost: Prefect could not be told of the run, or of its end.
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
    """What the caller of this flow made ready; None for a deployment's run."""
    value = _prepared.get()
    return value if isinstance(value, kind) else None


def call_flow(
    flow: Callable[..., Any], url: str, resume_hint: Callable[[], str], /, **parameters: Any
) -> Any:
    """As `run_flow`, of a flow, with the server at `url`.

    Workers and tasks ask no server, and Prefect's client tries again for a while: a server that is
    started again meanwhile costs nothing.
    """
    try:
        return flow(**parameters)
    except RunCancelled as error:
        from semix.flows.flow_runs import mark_cancelled  # Prefect is loaded, as there is a flow

        mark_cancelled(error)
        raise
    except BaseException as error:  # Prefect's refusals are no exceptions
        lost = describe_loss(error, url, ours=own_server_end(url))
        if not lost:
            raise
        flush_prefect(0.0)  # else a later run's states and lines would be sent there, too
        if (flow_error := _flow_error(error)) is not None:
            raise flow_error from None
        raise ServerLost(f"{lost}; {resume_hint()}") from error


def _flow_error(error: BaseException | None) -> BaseException | None:
    """How the flow's function had ended when its server was found lost, if not well."""
    ends = (RunFailed, InputError, KeyboardInterrupt, SystemExit)
    while error is not None and not isinstance(error, ends):
        error = error.__cause__ or error.__context__
    return error
