"""A headless Chromium, driven through its DevTools protocol; no node, no driver program."""

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # a test machine's root may not use it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-port=0",
)
TIMEOUT_S = 30.0


class Page:
    """One page of the browser.

    Attributes:
        errors: what its console and its scripts reported, such as violations of its policy.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._ids = connection, itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are noted."""
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=TIMEOUT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true; returns its value."""
        end = time.monotonic() + TIMEOUT_S
        while (value := self.run(script)) in (None, False, 0):
            assert time.monotonic() < end, f"never: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        box = self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "if (!e) return null; e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect();"
            "return b.width ? [b.x + b.width / 2, b.y + b.height / 2] : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def view(
        self, width: int, height: int = 900, *, dark: bool = False, phone: bool = False
    ) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Log.entryAdded":
            self.errors.append(message["params"]["entry"]["text"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A browser with one empty page; it ends with the block.

    Args:
        folder: for its profile, empty.
    """
    command = [PROGRAM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **quiet) as process:
        try:
            with connect(_page_address(folder), max_size=None) as connection:
                yield Page(connection)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _page_address(folder: Path) -> str:
    """The address of the page's protocol, once the browser listens."""
    file, end = folder / "DevToolsActivePort", time.monotonic() + TIMEOUT_S
    while not (file.is_file() and file.read_text().count("\n")):
        assert time.monotonic() < end, "Chromium does not start"
        time.sleep(0.02)
    port = file.read_text().split("\n")[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=TIMEOUT_S) as answer:
        pages = [target for target in json.load(answer) if target["type"] == "page"]
    address: str = pages[0]["webSocketDebuggerUrl"]
    return address
