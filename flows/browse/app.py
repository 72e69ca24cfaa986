"""The server of `semix browse`: JSON about series, images from their shards, and one static page.

Only this machine reaches it. A token in the address is exchanged for a cookie; other pages that a
browser has open can neither read nor change anything: the Host header must name the loopback, and
changes must come from the page itself.
"""

import secrets
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semix.data.browser import SHARD_LABELS, Browser
from semix.data.browser.table import Query as SeriesQuery
from semix.data.errors import InputError
from semix.data.formats import MAX_GROUPS
from semix.data.pages import page_environment
from semix.data.printable import noise_in_words, printable_line

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")  # as a browser names it, without the port
FOLDER = Path(__file__).parent
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
KEPT = {"Cache-Control": "private, max-age=86400, immutable"}  # addresses hold the tar's hash
NO_TOKEN = "Open the address that `semix browse` printed: it holds the token of this page.\n"
CHANGED = "the flag was not stored"


class Measurement(Protocol):
    """Reading all records in the background; see `semix.flows.browse.Measuring`."""

    started: bool
    on_request: bool

    def start(self) -> None: ...


class _Mark(BaseModel):
    """The body of a request that excludes a series, or takes that back."""

    model_config = ConfigDict(strict=True, extra="forbid")

    group: int = Field(ge=0, lt=MAX_GROUPS)
    excluded: bool


def browser_app(browser: Browser, *, token: str, port: int, measuring: Measurement) -> "Guard":
    """The application.

    Args:
        token: whoever has it may look and exclude.
        port: where it is served; cookies of one host are shared by all ports.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _add_pages(app)
    _add_api(app, browser, measuring)
    app.add_exception_handler(InputError, _refused(400))
    app.add_exception_handler(ValueError, _refused(422))  # a damaged shard, which it names
    app.add_exception_handler(OSError, _refused(503))
    return Guard(app, token=token, cookie=f"semix-browse-{port}")


def _add_pages(app: FastAPI) -> None:
    style = page_environment(FOLDER).from_string('{% include "base.css" %}{% include "page.css" %}')
    files = {
        "/": ((FOLDER / "page.html").read_text("utf-8"), "text/html"),
        "/page.js": ((FOLDER / "page.js").read_text("utf-8"), "text/javascript"),
        "/page.css": (style.render(), "text/css"),
    }

    @app.get("/")
    @app.get("/page.js")
    @app.get("/page.css")
    def file(request: Request) -> Response:
        content, media_type = files[request.url.path]
        return Response(content, media_type=media_type)

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)


def _add_api(app: FastAPI, browser: Browser, measuring: Measurement) -> None:
    def with_measuring(facts: dict[str, Any]) -> JSONResponse:
        return JSONResponse(facts | {"measuring": measuring.started})

    @app.get("/api/root")
    def root() -> JSONResponse:
        facts = browser.facts() | {"measure_on_request": measuring.on_request}
        return with_measuring(facts | browser.state())

    @app.get("/api/state")
    def state() -> JSONResponse:
        return with_measuring(browser.state())

    @app.get("/api/series")
    def page(
        query: Annotated[_PageQuery, Query()],
    ) -> JSONResponse:
        return with_measuring(browser.page(query.series(), offset=query.offset, limit=query.limit))

    @app.get("/api/series/{group}")
    def series(
        group: int, labels: Annotated[list[str] | None, Query(max_length=4)] = None
    ) -> JSONResponse:
        facts = browser.series(group, labels or [SHARD_LABELS])
        if "noise" in facts:
            facts["noise"] = printable_line(noise_in_words(facts["noise"]))
        return JSONResponse(facts)

    @app.get("/api/neighbours/{group}")
    def neighbours(group: int, query: Annotated[_PageQuery, Query()]) -> JSONResponse:
        return JSONResponse(browser.neighbours(query.series(), group))

    @app.get("/image/{group}/{position}")
    def image(group: int, position: int) -> Response:
        content, media_type = browser.image(group, position)
        return Response(content, media_type=media_type, headers=KEPT)

    @app.get("/strip/{group}")
    def strip(group: int) -> Response:
        content, media_type = browser.strip(group)
        return Response(content, media_type=media_type, headers=KEPT)

    @app.post("/api/excluded")
    def exclude(mark: _Mark) -> JSONResponse:
        try:
            return with_measuring(browser.set_excluded(mark.group, mark.excluded))
        except OSError as error:
            reason = printable_line(error.strerror or str(error))
            remedy = f"{browser.root.url} cannot be written ({reason}); {CHANGED}"
            return JSONResponse({"error": printable_line(remedy)}, status_code=403)

    @app.post("/api/measure")
    def measure() -> JSONResponse:
        measuring.start()
        return with_measuring(browser.state())


class _PageQuery(SeriesQuery):
    offset: int = Field(0, ge=0, lt=MAX_GROUPS)
    limit: int = Field(24, ge=1)

    def series(self) -> SeriesQuery:
        return SeriesQuery.model_construct(
            **{name: getattr(self, name) for name in SeriesQuery.model_fields}
        )


def _refused(status: int) -> Any:
    def handle(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": printable_line(str(error))}, status_code=status)

    return handle


class Guard:
    """Lets only requests to the loopback with the token or its cookie pass; adds security headers.

    Args:
        cookie: its name.
    """

    def __init__(self, app: ASGIApp, *, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no page of ours opens a WebSocket

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        app = self._answer(Request(scope)) or self._app
        await app(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The answer to a request that may not pass, or that brings the token; else None."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name.lower() not in LOOPBACK:
            return PlainTextResponse("only the loopback is served here\n", status_code=400)
        given = request.query_params.get("token")
        if request.method == "GET" and request.url.path == "/" and given is not None:
            return self._exchange(given)
        if not self._is_token(request.cookies.get(self._cookie, "")):
            return PlainTextResponse(NO_TOKEN, status_code=403)
        is_own = request.headers.get("origin") == f"http://{host}"
        if request.method not in ("GET", "HEAD") and not is_own:
            return PlainTextResponse("changes come from the page itself\n", status_code=403)
        return None

    def _exchange(self, given: str) -> Response:
        """Put the token into a cookie, and lead to the address without it."""
        if not self._is_token(given):
            return PlainTextResponse(NO_TOKEN, status_code=403)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
        return answer

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())
