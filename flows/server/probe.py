"""One short look at a Prefect server: is it there, ours to use, and of our version."""

import re
import ssl
import time
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from data.errors import InputError
from data.store.places import shown
from flows.errors import RunFailed
from flows.server import client_settings

if TYPE_CHECKING:  # the command line starts without it
    import httpx

ANSWER_S = 10.0  # a server that is not overwhelmed answers within a tenth of that
SAFE_SERVER = (3, 6, 28)  # earlier ones let requests past authentication
DATE_LAG_S = 2.0  # of a Date header: seconds are cut off, and servers renew it each second
NO_TOKEN = "takes changes with CSRF tokens alone, which are turned off here"
CSRF_REMEDY = "set PREFECT_CLIENT_CSRF_SUPPORT_ENABLED=true, or unset it"


@dataclass(frozen=True)
class ServerFacts:
    """What a server said.

    Attributes:
        url: free of secrets.
        version: of Prefect, as the server gives it; Prefect Cloud has none.
        authenticated: it takes requests with our key, or asks for none.
        clock_skew_s: its clock minus ours; its answers carry whole seconds.
        reason: why it cannot be used, and what to do; empty if it can.
        warning: what may go wrong although it can be used, and what to do; empty for nothing.
    """

    url: str
    reachable: bool = False
    version: str | None = None
    authenticated: bool = False
    clock_skew_s: float | None = None
    reason: str = ""
    warning: str = ""


class ServerLost(RunFailed):
    """A server that could be used when the run began could not be used to its end.

    Attributes:
        what: happened, without the remedy.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; what was committed stays, and the same command goes on")
        self.what = what


def require_server(url: str) -> ServerFacts:
    """What `probe` finds. Raises InputError if flows cannot run with this server."""
    facts = probe(url)
    if facts.reason:
        raise InputError("PREFECT_API_URL", facts.url, facts.reason)
    return facts


def probe(url: str, *, authorization: str | None = None) -> ServerFacts:
    """Ask a server twice, with the settings that Prefect's own client would use.

    Args:
        url: of the API, as in http://127.0.0.1:4200/api.
        authorization: header of that name; None is made of Prefect's settings.
    """
    import httpx

    address = shown(url)
    if not url.startswith(("http://", "https://")):
        return ServerFacts(address, reason="is no address; write http://HOST:4200/api")
    key = {"Authorization": authorization} if authorization else client_settings.key()
    try:
        with httpx.Client(
            base_url=url.rstrip("/"),
            headers=client_settings.custom_headers() | key,
            verify=client_settings.tls(),
            timeout=ANSWER_S,
            follow_redirects=True,
        ) as client:
            return _ask(client, address, has_key=bool(key))
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return ServerFacts(address, reason=_no_answer(error))


def _ask(client: "httpx.Client", address: str, *, has_key: bool) -> ServerFacts:
    asked, cloud = time.time(), address.startswith(client_settings.cloud())
    answer = client.get("/health" if cloud else "/admin/version")
    skew = _skew(answer.headers.get("Date"), asked, time.time())
    found = ServerFacts(address, reachable=True, clock_skew_s=skew)
    if refused := _key_refused(answer, has_key) or _fault(answer):
        return replace(found, reason=refused)
    text = None if cloud else _version_in(answer)
    if text is None and not cloud:
        return replace(found, reason="is not a Prefect API; its address usually ends in /api")
    reason, warning = _judge(text) if text else ("", "")
    found = replace(found, version=text, authenticated=True, reason=reason, warning=warning)
    if reason:
        return found
    # Counting flows asks the database; it is a POST, so that forged requests are told from ours.
    answer = client.post("/flows/count", json={})
    if _needs_token(answer):  # our probe carries none; Prefect's client does, unless told not to
        return (
            found
            if client_settings.sends_tokens()
            else replace(found, reason=f"{NO_TOKEN}; {CSRF_REMEDY}")
        )
    refused = _key_refused(answer, has_key)
    return replace(found, authenticated=not refused, reason=refused or _fault(answer))


def _key_refused(answer: "httpx.Response", has_key: bool) -> str:
    if answer.status_code not in (401, 403):
        return ""
    names = "PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud"
    if has_key:
        return f"refuses the key that is set here (HTTP {answer.status_code}); correct {names}"
    return f"asks for a key (HTTP {answer.status_code}); set {names}"


def _needs_token(answer: "httpx.Response") -> bool:
    return answer.status_code == 403 and "CSRF" in answer.text


def _fault(answer: "httpx.Response") -> str:
    if answer.status_code < 500:
        return ""
    return f"answers with errors (HTTP {answer.status_code}); its log says why, often its database"


def _version_in(answer: "httpx.Response") -> str | None:
    """The version that a Prefect API names; None if it is none."""
    try:
        text = answer.json() if answer.status_code == 200 else None
    except ValueError:
        return None
    return text if isinstance(text, str) and re.match(r"\d+\.\d+", text) else None


def _judge(server: str) -> tuple[str, str]:
    """Reason and warning of a server's version."""
    ours = version("prefect")
    if _numbers(server)[0] != _numbers(ours)[0]:
        remedy = f"runs Prefect {server}, and here is {ours}: install the same major version"
        return f"{remedy} on both sides", ""
    if _numbers(server) < SAFE_SERVER:
        oldest = ".".join(map(str, SAFE_SERVER))
        return "", f"runs Prefect {server}, which lets requests past its key; upgrade to {oldest}"
    if _numbers(server)[:2] < _numbers(ours)[:2]:
        return "", f"runs Prefect {server}, older than {ours} here; upgrade the server"
    return "", ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _no_answer(error: Exception) -> str:
    """Why nothing came back."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            why = getattr(cause, "verify_message", "") or cause.reason or "refused"
            remedy = "set PREFECT_API_SSL_CERT_FILE to the authority's certificate"
            return f"no safe connection (TLS: {why}); {remedy}, or correct the address"
        cause = cause.__cause__ or cause.__context__
    start = "start it, or unset this for one of our own"
    return f"no Prefect server answers there ({failure_words(error)}); {start}"


def failure_words(error: BaseException) -> str:
    """`Connection refused`, as httpx and the system call it."""
    words = {"ConnectTimeout": "no connection in time", "ReadTimeout": "no answer in time"}
    said = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return words.get(type(error).__name__, said)


def _skew(date: str | None, asked: float, answered: float) -> float | None:
    """Seconds that a Date header is off; 0 where its whole seconds explain it."""
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    if theirs > answered:
        return theirs - answered
    return min(0.0, theirs + DATE_LAG_S - asked)
