"""A proxy before an S3 server: errors, slowness, lost responses, cut bodies, refused writes."""

import http.client
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

WRITES = ("PUT", "POST", "DELETE")
KINDS = ("errors", "lost", "cut_answers", "cut_requests", "slow", "stalled", "forgotten")
CONTENTS = re.compile(
    r"(<Contents>(?:(?!</Contents>).)*?<Key>(.*?)</Key>.*?</Contents>)", re.DOTALL
)
CODES = {403: "AccessDenied", 404: "NoSuchKey", 429: "TooManyRequests", 503: "SlowDown"}


@dataclass(frozen=True)
class Faults:
    """What the proxy does wrong; fractions are of the requests with one of `methods`.

    Attributes:
        errors: fraction that is answered with one of `statuses` and never reaches the server;
            `code` and `message` replace the usual ones.
        lost: fraction that the server carries out, but whose response is lost with the connection.
        cut_answers: fraction whose response body ends in its middle.
        cut_requests: fraction whose connection ends in the middle of the request's body.
        slow: fraction that waits `slow_s` seconds first.
        stalled: fraction that is never answered.
        forgotten: fraction whose If-None-Match is dropped, as by servers that do not know it.
        late: listings do not show what was written since, and still show what was deleted since,
            if its name contains this.
        read_only: every write is refused with 403.
        path: only requests whose path and query contain this.
        max_faults: after so many faults the proxy is healthy again.
    """

    errors: float = 0.0
    statuses: Sequence[int] = (500, 503)
    code: str | None = None
    message: str = "told to fail"
    lost: float = 0.0
    cut_answers: float = 0.0
    cut_requests: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.2
    stalled: float = 0.0
    forgotten: float = 0.0
    read_only: bool = False
    late: str | None = None
    methods: Sequence[str] = ("GET", "HEAD", *WRITES)
    path: str = ""
    max_faults: int | None = None
    seed: int = 0


class FaultyS3:
    """The running proxy; `proxy.fail(errors=0.2)`, `proxy.heal()`, `proxy.done["errors"]`."""

    def __init__(self, server: str) -> None:
        self.target = urlsplit(server)
        self.done: Counter[str] = Counter()  # faults by name
        self.requests: Counter[str] = Counter()  # requests by method
        self.listed: dict[str, str] = {}  # the element of each key in the last listing of it
        self.heal()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "FaultyS3":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def fail(self, **faults: object) -> None:
        """Misbehave from now on, as the fields of `Faults` say."""
        self.faults = Faults(**faults)  # type: ignore[arg-type]
        self._random = random.Random(self.faults.seed)
        self.done.clear()
        self.written: set[str] = set()  # keys since `fail`
        self.deleted: dict[str, str] = {}  # by key, as in `listed`

    def heal(self) -> None:
        self.fail()

    def wait(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def next_fault(self, method: str, path: str) -> str | None:
        """The fault that this request meets; None for none."""
        faults = self.faults
        with self._lock:
            self.requests[method] += 1
            if faults.read_only and method in WRITES:
                self.done["read_only"] += 1
                return "read_only"
            spent = faults.max_faults is not None and sum(self.done.values()) >= faults.max_faults
            if spent or method not in faults.methods or faults.path not in path:
                return None
            draw = self._random.random()
            for name in KINDS:
                draw -= getattr(faults, name)
                if draw < 0:
                    self.done[name] += 1
                    return name
        return None

    def status(self) -> int:
        with self._lock:
            return self._random.choice(list(self.faults.statuses))

    def note(self, method: str, path: str) -> None:
        """Remember what a request changes, for listings that are late."""
        key = unquote(urlsplit(path).path).lstrip("/").partition("/")[2]
        if method in ("PUT", "POST"):
            self.written.add(key)
        if method == "DELETE" and key in self.listed:
            self.deleted[key] = self.listed[key]

    def late_listing(self, path: str, content: bytes) -> bytes:
        """The answer to a listing as it was before the last changes."""
        query = parse_qs(urlsplit(path).query)
        late = self.faults.late
        if "list-type" not in query:
            return content
        text, prefix = content.decode(), query.get("prefix", [""])[0]
        elements = {unquote(key): element for element, key in CONTENTS.findall(text)}
        self.listed |= elements
        if late is None:
            return content
        for key, element in elements.items():
            if late in key and key in self.written:
                text = text.replace(element, "")
        for key, element in self.deleted.items():
            if late in key and key.startswith(prefix) and "/" not in key.removeprefix(prefix):
                text = text.replace("</ListBucketResult>", f"{element}</ListBucketResult>")
        return text.encode()


def _handler_of(proxy: FaultyS3) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"proxy": proxy})


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyS3
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client left
            self.close_connection = True

    def _serve(self) -> None:
        fault = self.proxy.next_fault(self.command, self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if fault == "cut_requests":
            self.rfile.read(length // 2)
            return self._hang_up()
        body = self.rfile.read(length) if length else self._chunks()
        if fault == "stalled":
            self.proxy.wait(60)
            return self._hang_up()
        if fault == "slow":
            time.sleep(self.proxy.faults.slow_s)
        if fault == "errors":
            return self._answer_error(self.proxy.status())
        if fault == "read_only":
            return self._answer_error(403)
        if fault == "forgotten":
            del self.headers["If-None-Match"]
        response, content = self._forward(body)
        self.proxy.note(self.command, self.path)
        content = self.proxy.late_listing(self.path, content)
        if fault == "lost":
            return self._hang_up()
        return self._answer(response, content, cut=fault == "cut_answers")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _chunks(self) -> bytes | None:
        """The body of a chunked request; None for any other."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return None
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _forward(self, body: bytes | None) -> tuple[http.client.HTTPResponse, bytes]:
        target = self.proxy.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        dropped = ("transfer-encoding", "connection", "expect", "content-length")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        connection.request(self.command, self.path, body=body, headers=headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response, content

    def _answer(self, response: http.client.HTTPResponse, content: bytes, *, cut: bool) -> None:
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._hang_up()

    def _answer_error(self, status: int) -> None:
        faults = self.proxy.faults
        code = faults.code or CODES.get(status, "InternalError")
        text = f"<Error><Code>{code}</Code><Message>{faults.message}</Message></Error>"
        content = b"" if self.command == "HEAD" else text.encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
