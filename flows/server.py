"""The Prefect server of a run: the configured one, else one of our own on the loopback.

Without a configured server every process that runs a flow would start one, all on the same
SQLite file. `python -m flows.child flows.server SOCKET` is the server process.
"""

import gc
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from data.errors import InputError
from flows import child

log = logging.getLogger("semix.server")

START_TIMEOUT_S = 180.0  # the first start on a machine creates Prefect's database
DRAIN_TIMEOUT_S = 10.0

# The database may be the one a user's other flows live in: show runs, record them, and leave
# schedules, late runs, workers and automations to the server that user runs for them.
FOREIGN_SERVICES = (
    "SCHEDULER",
    "LATE_RUNS",
    "FOREMAN",
    "PAUSE_EXPIRATIONS",
    "CANCELLATION_CLEANUP",
    "REPOSSESSOR",
    "TRIGGERS",
)
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # With batches of one, the default, task states trail the client by minutes.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "500",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in FOREIGN_SERVICES},
}


@dataclass
class Server:
    """Our server process; its log is a file, its life ends with ours."""

    url: str
    log: Path
    process: "subprocess.Popen[str]"

    def wait_until_ready(self) -> None:
        """Raises RuntimeError, with the end of the log, if the server does not come up."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{self.url}/ready"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                end = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
                raise RuntimeError(f"the Prefect server did not start; {self.log} ends:\n{end}")
            time.sleep(0.1)


_lock = threading.Lock()
_ours: Server | None = None


@contextmanager
def prefect_server(*, wait: bool = True) -> Iterator[str]:
    """Make sure of one Prefect server for the block; yields its API URL.

    Nested blocks share one server. It is ours, stopped at the end of the outermost block, unless
    PREFECT_API_URL is set in the environment or Prefect's active profile.

    Args:
        wait: False returns while our server is still starting, so that other work can go on;
            a nested block with True then waits.
    Raises:
        InputError: nothing answers at the configured URL.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    global _ours
    configured = PREFECT_API_URL.value()
    if configured and _ours is None:
        yield _configured(configured)
        return
    with ExitStack() as stack:
        with _lock:
            if _ours is None:
                _ours = _start()
                stack.callback(_stop)
            server = _ours
        stack.enter_context(temporary_settings({PREFECT_API_URL: server.url}))
        if wait:
            server.wait_until_ready()
        yield server.url


def _configured(url: str) -> str:
    if not _answers(f"{url.rstrip('/')}/health"):
        remedy = "no Prefect server answers there; start it, or unset this for one of our own"
        raise InputError("PREFECT_API_URL", url, remedy)
    return url


def _start() -> Server:
    from prefect.settings import PREFECT_HOME

    path = Path(PREFECT_HOME.value()) / "semix-server.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    # The socket is bound here and inherited, so nobody can take the port in between.
    with socket.socket() as listener, path.open("a") as output:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}/api"
        process = child.start(
            child.python_module("flows.server", str(listener.fileno())),
            environment={**SETTINGS, "PREFECT_API_URL": "", "PREFECT_UI_API_URL": url},
            pass_fds=(listener.fileno(),),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    log.info("starting Prefect for this run: %s", url.removesuffix("/api"))
    return Server(url, path, process)


def _stop() -> None:
    global _ours
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    if _ours is None:
        return
    for queue in (APILogWorker, EventsWorker):  # else the last states of a run are lost
        queue.drain_all(timeout=DRAIN_TIMEOUT_S, at_exit=False)
    child.end(_ours.process)
    _ours = None


def _answers(url: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, TimeoutError, ConnectionError):
        return False


def main(listener: socket.socket) -> None:
    """Serve Prefect's API and pages on a bound socket until SIGTERM."""
    gc.disable()  # a sixth of the start is spent collecting modules that are all kept
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    gc.freeze()
    gc.enable()
    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
