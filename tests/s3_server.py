"""`python -m tests.s3_server`: moto's S3 until standard input ends; prints its port."""

import io
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server


class OneAtATime:
    """Serves one request at a time: moto checks and writes a create-only object in two steps."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app, self._lock = app, threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        # Read before the lock is taken: a slow sender must not hold up other requests.
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if not environ.get("wsgi.input_terminated"):
            body = environ["wsgi.input"].read(length)
            if len(body) < length:
                start("400 Bad Request", [])
                return [b""]
            environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            return list(self._app(environ, start))


def main() -> None:
    app = OneAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    print(server.server_port, flush=True)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    server.serve_forever()


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
