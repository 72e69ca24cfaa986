"""Call a flow: what its function did counts, whether or not Prefect could be told."""

import functools
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar
from uuid import UUID

from prefect import Flow, get_client, runtime
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Completed, State

from flows.errors import RunCancelled
from flows.server.loss import loss
from flows.server.probe import ServerLost, probe
from flows.server.run_server import how_ours_ended

T = TypeVar("T")

PATIENCE_S = 60.0  # for a server that is just being started again when the work is done
LOOK_EVERY_S = 1.0
LAST_RETRIES = 1

log = logging.getLogger("semix.prefect")


def call_flow(flow: Flow[..., T], **parameters: Any) -> T:
    """What the flow's function returns or raises, even where its server was lost meanwhile.

    The work goes on without a server: the store says what is done, and task runs ask nobody.

    Raises:
        ServerLost: the server failed before the function was through.
    """
    ending: _Ending[T] = _Ending()
    watched: Any = flow.with_options()
    watched.fn = ending.watching(flow.fn)
    with ending.settings:
        try:
            result: T = watched(**parameters)
            return result
        except RunCancelled as error:
            ending.note(Cancelled(message=str(error)))
            raise
        except BaseException as error:  # Prefect's refusals are no exceptions
            url = str(PREFECT_API_URL.value())
            lost = loss(error, url, ours=how_ours_ended(url))
            if lost is None:
                raise
            if error is ending.error:
                raise lost from error
        return ending.without_prefect(lost)


class _Ending(Generic[T]):
    """How a flow's function ended.

    Attributes:
        settings: of Prefect, once it has ended; they end with the call.
    """

    def __init__(self) -> None:
        self.values: list[T] = []
        self.error: BaseException | None = None
        self.run = ""
        self.settings = ExitStack()

    def watching(self, function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> T:
            self.run = str(runtime.flow_run.id)
            try:
                self.values.append(function(*args, **kwargs))
            except BaseException as error:
                self.error = error
                raise
            finally:
                self._await_server()
            return self.values[0]

        return watched

    def without_prefect(self, lost: ServerLost) -> T:
        """The end that Prefect was not told."""
        if self.error is not None:
            log.warning("%s; its pages lack how this run ended", lost.what)
            raise self.error
        if not self.values:
            raise lost
        if not self.note(Completed()):
            log.warning("%s; all that was wanted is done, only its pages do not say so", lost.what)
        return self.values[0]

    def _await_server(self) -> None:
        """Before Prefect is told: wait a while for a server that does not answer.

        Prefect itself would try for two minutes, without a word, and in the end note a failure.
        """
        stopped = self.error is not None and not isinstance(self.error, Exception)
        answers = not stopped and _answers(PATIENCE_S)
        retries = {PREFECT_CLIENT_MAX_RETRIES: LAST_RETRIES if answers else 0}
        self.settings.enter_context(temporary_settings(retries))

    def note(self, state: State[Any]) -> bool:
        """Whether the server takes this as the end, whatever it noted before."""
        try:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(self.run), state, force=True)
        except Exception:
            return False
        return True


def _answers(patience_s: float) -> bool:
    url, since, said = str(PREFECT_API_URL.value()), time.monotonic(), False
    while not probe(url).reachable:
        if how_ours_ended(url) or time.monotonic() - since > patience_s:
            return False
        if not said:
            log.warning("%s does not answer; waiting up to %.0f s for it", url, patience_s)
            said = True
        time.sleep(LOOK_EVERY_S)
    return True
