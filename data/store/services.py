"""The interface that s3.py and gs.py implement, and the retry policy of their requests."""

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from semix.data.store.location import FileInfo

T = TypeVar("T")
Info = Mapping[str, Any]  # a service's own description of an object or of an upload
logger = logging.getLogger("semix.store")

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 16.0
_random = random.Random()  # a generator of its own, so that no seed elsewhere is affected


@dataclass(frozen=True)
class RetryPolicy:
    """Limits on the attempts at one operation.

    Attributes:
        seconds: time after the first attempt in which further attempts may start.
        attempts: attempts per request by the library of the service, within each attempt here.
        connect_s, answer_s: timeouts for a connection and for an answer.
    """

    seconds: float
    attempts: int
    connect_s: float
    answer_s: float


DEFAULT_RETRIES = RetryPolicy(seconds=120.0, attempts=4, connect_s=10.0, answer_s=30.0)
# For the first access to a location: a wrong address is more likely than an outage.
QUICK_RETRIES = RetryPolicy(seconds=4.0, attempts=1, connect_s=3.0, answer_s=6.0)


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was begun and not completed; its key is base/name."""

    name: str
    id: str
    info: FileInfo


class Service(Protocol):
    """A module for one service; `fs` is the result of `connect`, `base` is bucket/prefix."""

    SHARED: bool

    def connect(self, policy: RetryPolicy) -> AbstractFileSystem: ...

    def is_transient(self, error: Exception) -> str | None:
        """The name of the fault if another attempt may succeed, else None."""
        ...

    def translate_error(self, error: Exception, url: str, where: str) -> Exception:
        """The error to raise instead: of a built-in type, and without secrets in its message."""
        ...

    def modified(self, info: Info) -> float: ...

    def mark(self, token: str) -> dict[str, object]:
        """Arguments of a write that store a token with the object."""
        ...

    def written_by(self, fs: AbstractFileSystem, path: str) -> str | None:
        """The token that was stored with the object."""
        ...

    def now(self, fs: AbstractFileSystem, base: str) -> float: ...

    def unfinished(self, fs: AbstractFileSystem, base: str) -> list[Upload]: ...

    def abort(self, fs: AbstractFileSystem, base: str, upload: Upload) -> None: ...

    def address(self) -> str:
        """The server's address, for messages."""
        ...


class InMemoryService:
    """Objects in the memory of this process, for tests."""

    SHARED = False

    def connect(self, policy: RetryPolicy) -> AbstractFileSystem:
        return MemoryFileSystem()

    def is_transient(self, error: Exception) -> str | None:
        return None

    def translate_error(self, error: Exception, url: str, where: str) -> Exception:
        return error

    def modified(self, info: Info) -> float:
        created = info["created"]
        return created if isinstance(created, float) else created.timestamp()

    def mark(self, token: str) -> dict[str, object]:
        return {}

    def written_by(self, fs: AbstractFileSystem, path: str) -> str | None:
        return None

    def now(self, fs: AbstractFileSystem, base: str) -> float:
        return time.time()

    def unfinished(self, fs: AbstractFileSystem, base: str) -> list[Upload]:
        return []

    def abort(self, fs: AbstractFileSystem, base: str, upload: Upload) -> None:
        raise AssertionError("nothing is ever unfinished here")

    def address(self) -> str:
        return "this process's memory"


def retrying(
    operation: Callable[[], T],
    *,
    what: str,
    is_transient: Callable[[Exception], str | None],
    policy: RetryPolicy,
) -> T:
    """The result of the operation, which is retried while the policy allows.

    Args:
        what: name of the operation in the log.
        is_transient: returns the name of a fault if another attempt may succeed, else None.
    """
    started, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return operation()
        except Exception as error:
            fault = is_transient(error)
            # The pause is partly random, so that many workers do not return at the same time.
            wait = pause * _random.uniform(0.5, 1.5)
            if fault is None or time.monotonic() + wait > started + policy.seconds:
                raise
        logger.warning("%s: %s; again in %.1f s", what, fault, wait)
        time.sleep(wait)
        pause = min(2 * pause, MAX_PAUSE_S)
