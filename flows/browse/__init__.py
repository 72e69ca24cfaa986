"""`semix browse`: a page on the loopback that shows the series of a root, and excludes some."""

import secrets
import socket
import threading
from collections.abc import Callable

import numpy as np
import uvicorn

from semix.data.browser import Browser
from semix.data.errors import InputError
from semix.data.root import Root
from semix.flows.browse.app import browser_app
from semix.flows.failures import translate_damage
from semix.pipeline.plan import build_of

HOST = "127.0.0.1"


def browse(url: str, *, port: int = 0, show: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted.

    Args:
        port: to listen on; 0 takes a free one.
        show: called with the address, which holds the token, once it answers.
    Raises:
        InputError: no root, nothing committed, flags that are damaged, a port that is in use.
        RunFailed: the newest index is damaged.
    """
    root = Root(url)
    with translate_damage(root.url):
        browser = Browser(root, classes=_planned_classes(root))
    token = secrets.token_urlsafe(32)
    with _listener(port) as listener:
        port = listener.getsockname()[1]
        stop = threading.Event()
        measuring = Measuring(browser, stop)
        app = browser_app(browser, token=token, port=port, measuring=measuring)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", ws="none"
        )
        show(f"http://{HOST}:{port}/?token={token}")
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            stop.set()


class Measuring:
    """Reads all records of a root once, in a thread, when it is started.

    Attributes:
        on_request: whether it starts only when somebody asks for it: of a bucket, it reads nearly
            all bytes of the tars. A local root is measured after its first page was shown.
    """

    def __init__(self, browser: Browser, stop: threading.Event) -> None:
        self.on_request = not browser.root.store.local
        self._thread = threading.Thread(target=browser.measure, args=(stop,), daemon=True)
        self._lock = threading.Lock()
        self.started = False

    def start(self) -> None:
        with self._lock:
            if not self.started:
                self.started = True
                self._thread.start()


def _planned_classes(root: Root) -> np.ndarray | None:
    """The classes of every group; None if its settings are another version's.

    Its pairs are then known as soon as the records are read.
    """
    try:
        return build_of(root).plan.classes()
    except InputError:
        return None


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError("--port", port, f"{reason}; choose another, or leave it out") from None
    return listener
