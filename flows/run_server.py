"""The Prefect server of a run: the configured server, else our own on the loopback.

Without a configured server, Prefect would start one in every process that runs a flow, all on the
same SQLite file. Our server's process is `python -m semix.flows.child semix.flows.run_server
SOCKET`.
"""

import gc
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from semix.flows import child
from semix.flows.failures import RunFailed
from semix.flows.server_probe import require_server

log = logging.getLogger("semix.server")

# Read when Prefect is imported: we report a lost server once, Prefect's client at every event.
os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")

# The database may also hold a user's other flows: our server shows and records runs, and leaves
# schedules, late runs, workers and automations to the user's own server.
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
    # A foreign web page must not change anything, even with our key in the browser.
    "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
    # With batches of one, the default, task states lag behind by minutes.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "500",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in FOREIGN_SERVICES},
}
START_TIMEOUT_S = 180.0  # the first start on a machine creates Prefect's database
SEND_TIMEOUT_S = 10.0  # for sending the last states and log lines to a living server
LAST_LINES = 20
# A foreign web page may map its own host name to the loopback: a browser then takes our server for
# that page's (DNS rebinding). Any port is allowed, as one may be forwarded to us.
HOSTS = ("127.0.0.1", "localhost")
# Retries and seconds per request, unless the user sets them: a process whose server is lost ends
# only after these attempts to send its state, its failure and its last log lines.
CLIENT_DEFAULTS = {"client.max_retries": 3, "api.request_timeout": 30.0}


@dataclass
class Server:
    """Our server process, which logs to a file and ends with our process.

    Attributes:
        key: user:password, for the settings of its clients.
        key_file: file with the key, which only the user can read, to open the server's pages.
    """

    url: str
    log: Path
    process: "subprocess.Popen[str]"
    key: str = field(repr=False)
    key_file: Path
    announced: bool = False

    def wait_until_ready(self) -> None:
        """Raises RunFailed, with the end of the log, if the server does not come up."""
        if not self.announced:
            log.info("starting Prefect for this run: %s", self.url.removesuffix("/api"))
            # The key itself is not logged: logs are stored in many places.
            log.info("its login is in %s", self.key_file)
            self.announced = True
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{self.url}/ready"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(self._start_failure())
            time.sleep(0.1)

    def _start_failure(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        if any("database is locked" in line for line in lines):
            remedy = "end the process that locks it, or set PREFECT_HOME to another folder"
            return f"Prefect's database in {self.log.parent} is locked; {remedy}"
        return "\n".join([f"the Prefect server did not start; {self.log} ends:", *lines])


_lock = threading.Lock()
_own_server: Server | None = None
_probed_url: ContextVar[str] = ContextVar("usable", default="")  # of the configured server


@contextmanager
def prefect_server(*, wait: bool = True) -> Iterator[str]:
    """Provide one Prefect server for the block; yields its API URL.

    Nested blocks share one server. It is our own, stopped at the end of the outermost block, unless
    PREFECT_API_URL is set in the environment or Prefect's active profile.

    Args:
        wait: False enters the block while our server is still starting; a nested block with True
            then waits.
    Raises:
        InputError: the configured server cannot be used; states the reason and the remedy.
    """
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
        temporary_settings,
    )

    global _own_server
    configured = PREFECT_API_URL.value()
    if configured and _own_server is None:
        if configured != _probed_url.get():
            facts = require_server(configured)
            if facts.warning:
                log.warning("PREFECT_API_URL = %s: %s", facts.url, facts.warning)
        token = _probed_url.set(configured)
        try:
            with temporary_settings(set_defaults=CLIENT_DEFAULTS):
                yield configured
        finally:
            _probed_url.reset(token)
        return
    with ExitStack() as stack:
        with _lock:
            if _own_server is None:
                _own_server = _start()
                stack.callback(_stop)
            server = _own_server
        client_settings = {
            PREFECT_API_URL: server.url,
            PREFECT_API_AUTH_STRING: server.key,
            PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: True,
        }
        stack.enter_context(temporary_settings(client_settings, set_defaults=CLIENT_DEFAULTS))
        if wait:
            server.wait_until_ready()
        yield server.url


def is_own_server() -> bool:
    """Whether this process runs its own server, so that none was configured."""
    return _own_server is not None


def own_server_end(url: str) -> str:
    """A phrase that says so if our own server was at `url` and has ended; else empty."""
    if _own_server is None or _own_server.url != url or _own_server.process.poll() is None:
        return ""
    return f"our own Prefect server ended ({_own_server.log} says why) and"


def _start() -> Server:
    from prefect.settings import PREFECT_HOME

    path = Path(PREFECT_HOME.value()) / "semix-server.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    # The socket is bound here and inherited, so that no other program can take the port.
    with socket.socket() as listener, path.open("a") as output:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        origin = f"http://127.0.0.1:{port}"
        url = f"{origin}/api"
        key, key_file = _new_key(path.with_name(f"semix-server-{port}.key"))
        process = child.start(
            child.python_module("semix.flows.run_server", str(listener.fileno())),
            environment={
                **SETTINGS,
                # Not an argument, which every user of this machine could read.
                "PREFECT_SERVER_API_AUTH_STRING": key,
                "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": origin,
                "PREFECT_API_URL": "",
                "PREFECT_UI_API_URL": url,
            },
            pass_fds=(listener.fileno(),),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Server(url, path, process, key, key_file)


def _new_key(file: Path) -> tuple[str, Path]:
    """A key for this run only, written to a file that only its user can read."""
    key = f"semix:{secrets.token_urlsafe(32)}"
    file.unlink(missing_ok=True)  # left by a killed run
    file.touch(0o600, exist_ok=False)
    file.write_text(f"{key}\n")
    return key, file


def _stop() -> None:
    global _own_server
    if _own_server is None:
        return
    flush_prefect(SEND_TIMEOUT_S if _own_server.process.poll() is None else 0.0)
    child.end(_own_server.process)
    _own_server.key_file.unlink(missing_ok=True)
    _own_server = None


def flush_prefect(timeout_s: float) -> None:
    """Wait until Prefect has sent its lines; later ones would go to another server."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for service in (APILogWorker, EventsWorker):
        service.drain_all(timeout=timeout_s, at_exit=False)


def _answers(url: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, TimeoutError, ConnectionError):
        return False


def main(listener: socket.socket) -> None:
    """Serve Prefect's API and pages on a bound socket until SIGTERM."""
    gc.disable()  # collecting garbage takes a sixth of the start, and modules are no garbage
    import uvicorn
    from prefect.server.api.server import create_app
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = TrustedHostMiddleware(create_app(final=True), HOSTS)
    gc.freeze()
    gc.enable()
    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
