"""Probe a Prefect server as its clients do: whether it can be used, and what its errors mean."""

import base64
import re
import ssl
import time
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from semix.data.errors import InputError
from semix.data.store.location import printable_url

if TYPE_CHECKING:  # the command line starts without them: Prefect costs more than a second
    import httpx
    from prefect.settings import Settings

ANSWER_S = 10.0  # a server that is not overloaded answers within a tenth of this
SAFE_SERVER = (3, 6, 28)  # earlier versions let requests bypass authentication
DATE_LAG_S = 2.0  # age of a Date header: it has whole seconds, and servers renew it each second
NO_TOKEN = "accepts changes only with CSRF tokens, which are turned off here"
CSRF_REMEDY = "set PREFECT_CLIENT_CSRF_SUPPORT_ENABLED=true, or unset it"
# Names of classes, so that the command line can compare without importing Prefect.
STATUS_ERRORS = ("prefect.exceptions.PrefectHTTPStatusError", "prefect.exceptions.ObjectNotFound")
ABORT = "prefect.exceptions.Abort"
REQUEST_ERROR = "httpx.RequestError"


@dataclass(frozen=True)
class ServerFacts:
    """What a probe finds out about a server.

    Attributes:
        url: without secrets.
        version: of Prefect, as the server reports it; Prefect Cloud reports none.
        authenticated: whether it accepts our key, or requires none.
        clock_skew_s: its clock minus ours, from Date headers, which have whole seconds.
        reason: why it cannot be used, and what to do; empty if it can.
        warning: what may go wrong although it can be used, and what to do; or empty.
    """

    url: str
    reachable: bool = False
    version: str | None = None
    authenticated: bool = False
    clock_skew_s: float | None = None
    reason: str = ""
    warning: str = ""


def prefect_settings() -> "Settings":
    """Settings of the environment and the active profile, as Prefect's own client reads them."""
    from prefect.settings import get_current_settings

    return get_current_settings()


def require_server(url: str) -> ServerFacts:
    """The facts from `probe`. Raises InputError if flows cannot run with this server."""
    facts = probe(url)
    if facts.reason:
        raise InputError("PREFECT_API_URL", facts.url, facts.reason)
    return facts


def probe(url: str) -> ServerFacts:
    """Send a server two requests, with the settings that Prefect's own client would use.

    Args:
        url: URL of the API, as in http://127.0.0.1:4200/api.
    """
    import httpx

    address, settings = printable_url(url), prefect_settings()
    if not url.startswith(("http://", "https://")):
        return ServerFacts(address, reason="is no address; write http://HOST:4200/api")
    key = authorization()
    try:
        with httpx.Client(
            base_url=url.rstrip("/"),
            headers={**settings.client.custom_headers, **key},
            verify=_tls_context(settings),
            timeout=ANSWER_S,
            follow_redirects=True,
        ) as client:
            return _ask(client, address, settings, has_key=bool(key))
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return ServerFacts(address, reason=_no_answer_reason(error))


def authorization() -> dict[str, str]:
    """Our Authorization header; empty without a key. As in Prefect, `auth_string` comes first."""
    api = prefect_settings().api
    if api.auth_string:
        token = base64.b64encode(api.auth_string.get_secret_value().encode()).decode()
        return {"Authorization": f"Basic {token}"}
    return {"Authorization": f"Bearer {api.key.get_secret_value()}"} if api.key else {}


def _tls_context(settings: "Settings") -> ssl.SSLContext:
    import certifi

    if settings.api.tls_insecure_skip_verify:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=settings.api.ssl_cert_file or certifi.where())


def _ask(
    client: "httpx.Client", address: str, settings: "Settings", *, has_key: bool
) -> ServerFacts:
    sent_at, is_cloud = time.time(), address.startswith(str(settings.cloud.api_url))
    answer = client.get("/health" if is_cloud else "/admin/version")
    skew = _skew(answer.headers.get("Date"), sent_at, time.time())
    facts = ServerFacts(address, reachable=True, clock_skew_s=skew)
    if error := _key_error(answer, has_key) or _fault(answer):
        return replace(facts, reason=error)
    text = None if is_cloud else _version_in(answer)
    if text is None and not is_cloud:
        return replace(facts, reason="is not a Prefect API; its address usually ends in /api")
    reason, warning = _version_problems(text) if text else ("", "")
    facts = replace(facts, version=text, authenticated=True, reason=reason, warning=warning)
    if reason:
        return facts
    # Counting flows reads the database; it is a POST, so CSRF protection applies to it.
    answer = client.post("/flows/count", json={})
    if _needs_token(answer):  # our probe has none; Prefect's client has, unless turned off
        client_sends_tokens = settings.client.csrf_support_enabled
        return facts if client_sends_tokens else replace(facts, reason=f"{NO_TOKEN}; {CSRF_REMEDY}")
    error = _key_error(answer, has_key)
    return replace(facts, authenticated=not error, reason=error or _fault(answer))


def _key_error(answer: "httpx.Response", has_key: bool) -> str:
    if answer.status_code not in (401, 403):
        return ""
    names = "PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud"
    if has_key:
        return f"refuses the key that is set here (HTTP {answer.status_code}); correct {names}"
    return f"requires a key (HTTP {answer.status_code}); set {names}"


def _needs_token(answer: "httpx.Response") -> bool:
    return answer.status_code == 403 and "CSRF" in answer.text


def _fault(answer: "httpx.Response") -> str:
    if answer.status_code < 500:
        return ""
    return f"answers with errors (HTTP {answer.status_code}); its log says why, often its database"


def _version_in(answer: "httpx.Response") -> str | None:
    """The version in the answer of a Prefect API; None for any other answer."""
    try:
        text = answer.json() if answer.status_code == 200 else None
    except ValueError:
        return None
    return text if isinstance(text, str) and re.match(r"\d+\.\d+", text) else None


def _version_problems(remote: str) -> tuple[str, str]:
    """The reason and the warning that follow from a server's version."""
    local = version("prefect")
    if _numbers(remote)[0] != _numbers(local)[0]:
        remedy = f"runs Prefect {remote}, but here is {local}: install the same major version"
        return f"{remedy} on both sides", ""
    if _numbers(remote) < SAFE_SERVER:
        oldest = ".".join(map(str, SAFE_SERVER))
        return "", f"runs Prefect {remote}, whose key can be bypassed; upgrade to {oldest}"
    if _numbers(remote)[:2] < _numbers(local)[:2]:
        return "", f"runs Prefect {remote}, older than {local} here; upgrade the server"
    return "", ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _no_answer_reason(error: Exception) -> str:
    """Why the server gave no answer."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            tls_error = getattr(cause, "verify_message", "") or cause.reason or "refused"
            remedy = "set PREFECT_API_SSL_CERT_FILE to the authority's certificate"
            return f"no safe connection (TLS: {tls_error}); {remedy}, or correct the address"
        cause = cause.__cause__ or cause.__context__
    start = "start it, or unset this so that semix starts one"
    return f"no Prefect server answers there ({_failure_words(error)}); {start}"


def _failure_words(error: BaseException) -> str:
    """`Connection refused`: the text of httpx or the system, without its number."""
    words = {"ConnectTimeout": "no connection in time", "ReadTimeout": "no answer in time"}
    text = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return words.get(type(error).__name__, text)


def _skew(date: str | None, sent_at: float, answered_at: float) -> float | None:
    """A Date header minus our time, in seconds; 0 if the header's whole seconds explain it."""
    try:
        server_time = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    if server_time > answered_at:
        return server_time - answered_at
    return min(0.0, server_time + DATE_LAG_S - sent_at)


def describe_loss(error: BaseException, url: str, *, own_server_end: str = "") -> str:
    """What happened, if this error comes from the Prefect server at `url`; else empty.

    Args:
        own_server_end: how our own server ended; empty for another server.
    """
    name = own_server_end or f"the Prefect server at {printable_url(url)}"
    if ABORT in _class_names(error):
        return f"{name} says that this run is over ({error})"
    cause: BaseException | None = error
    while cause is not None and not _request_fault(cause):
        cause = cause.__cause__
    if cause is None or not _request_url(cause).startswith(url.rstrip("/")):
        return ""
    if _status(cause) == 404:
        return f"{name} does not know this run any more (HTTP 404); was its database wiped?"
    return f"{name} {_request_fault(cause)}"


def describe_request_error(error: BaseException) -> str:
    """One line on an error of a request to any server; empty for other errors."""
    fault, url = _request_fault(error), printable_url(_request_url(error))
    return f"the server of {url} {fault}" if fault else ""


def _request_fault(error: BaseException) -> str:
    kinds = _class_names(error)
    if REQUEST_ERROR in kinds:
        return f"does not answer ({_failure_words(error)})"
    if not kinds & set(STATUS_ERRORS):
        return ""
    status = _status(error)
    if status in (401, 403):
        return f"refuses our key (HTTP {status}); correct PREFECT_API_AUTH_STRING"
    if status >= 500:
        return f"answers with errors (HTTP {status}); its log says why, often its database"
    return f"refuses the request (HTTP {status})"


def _class_names(error: BaseException) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    # Prefect wraps 404 into its own error, which holds the response.
    answer = getattr(getattr(error, "http_exc", error), "response", None)
    return int(getattr(answer, "status_code", 0))


def _request_url(error: BaseException) -> str:
    request_error: Any = getattr(error, "http_exc", error)
    try:
        return str(request_error.request.url)
    except (AttributeError, RuntimeError):  # httpx raises it if the request is not known
        return ""
