"""Which errors mean that a server was lost or refused, and how that is said."""

from typing import Any

from data.store.places import shown
from flows.server.probe import ServerLost, failure_words

# By name, so that the command line can ask without Prefect, which takes a second to import.
ANSWERS = ("prefect.exceptions.PrefectHTTPStatusError", "prefect.exceptions.ObjectNotFound")
REFUSAL = "prefect.exceptions.Abort"
SILENCE = "httpx.RequestError"


def loss(error: BaseException, url: str, *, ours: str = "") -> ServerLost | None:
    """What was lost, if this error comes of the Prefect server at `url`.

    Args:
        ours: how our own server ended; empty for another's.
    """
    name = ours or f"the Prefect server at {shown(url)}"
    if REFUSAL in _kinds(error):
        return ServerLost(f"{name} says that this run is over ({error})")
    if isinstance(error, RuntimeError) and str(error).startswith("Failed to reach API at"):
        return ServerLost(f"{name} does not answer")
    happened = _happened(error)
    if not happened and error.__cause__ and type(error).__module__.startswith("prefect."):
        return loss(error.__cause__, url, ours=ours)  # as of a task that asked for its limits
    if not happened or not _asked(error).startswith(url.rstrip("/")):
        return None
    if _status(error) == 404:
        happened = "does not know this run any more (HTTP 404); was its database wiped?"
    return ServerLost(f"{name} {happened}")


def in_words(error: BaseException) -> str:
    """An error of a request, to whomever, in one line; empty for other errors."""
    happened, url = _happened(error), shown(_asked(error))
    return f"the server of {url} {happened}" if happened else ""


def _happened(error: BaseException) -> str:
    kinds = _kinds(error)
    if SILENCE in kinds:
        return f"does not answer ({failure_words(error)})"
    if not kinds & set(ANSWERS):
        return ""
    status = _status(error)
    if status in (401, 403):
        return f"refuses our key (HTTP {status}); correct PREFECT_API_AUTH_STRING"
    if status >= 500:
        return f"answers with errors (HTTP {status}); its log says why, often its database"
    return f"refuses the request (HTTP {status})"


def _kinds(error: BaseException) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    # Prefect turns 404 into an error of its own, with the answer within.
    answer = getattr(getattr(error, "http_exc", error), "response", None)
    return int(getattr(answer, "status_code", 0))


def _asked(error: BaseException) -> str:
    found: Any = getattr(error, "http_exc", error)
    try:
        return str(found.request.url)
    except (AttributeError, RuntimeError):  # httpx: nobody said which request it was
        return ""
