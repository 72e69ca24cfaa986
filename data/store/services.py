"""The interface that s3.py and gs.py implement, and the retry policy of their requests."""

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

T = TypeVar("T")
Info = Mapping[str, Any]  # a service's own description of an object
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


class Service(Protocol):
    """A module for one service; `fs` is the result of `connect`, `bucket_path` is bucket/prefix."""

    SHARED: bool  # whether several machines can write to one store

    def connect(self, policy: RetryPolicy) -> AbstractFileSystem: ...

    def transient_reason(self, error: Exception) -> str | None:
        """Short description of the fault if a retry may help, else None."""
        ...

    def translate_error(self, error: Exception, url: str, where: str) -> Exception:
        """The error to raise instead: of a built-in type, and without secrets in its message.

        Args:
            url: of the store, for an InputError.
            where: URL of the file, or of the store, for the other errors.
        """
        ...

    def modified_time(self, info: Info) -> float:
        """Time of the last write, UNIX seconds by the service's clock."""
        ...

    def writer_options(self, writer_id: str) -> dict[str, object]:
        """Arguments of a write that store an id of this write's caller with the object."""
        ...

    def writer_id_of(self, fs: AbstractFileSystem, path: str) -> str | None:
        """The id that the object's writer stored with it; None without one."""
        ...

    def now(self, fs: AbstractFileSystem, bucket_path: str) -> float:
        """The service's clock, from the Date header of any answer; UNIX seconds."""
        ...

    def address(self) -> str:
        """The server's address, for messages."""
        ...


class InMemoryService:
    """Objects in the memory of this process, for tests."""

    SHARED = False

    def connect(self, policy: RetryPolicy) -> AbstractFileSystem:
        return MemoryFileSystem()

    def transient_reason(self, error: Exception) -> str | None:
        return None

    def translate_error(self, error: Exception, url: str, where: str) -> Exception:
        return error

    def modified_time(self, info: Info) -> float:
        created = info["created"]
        return created if isinstance(created, float) else created.timestamp()

    def writer_options(self, writer_id: str) -> dict[str, object]:
        return {}

    def writer_id_of(self, fs: AbstractFileSystem, path: str) -> str | None:
        return None

    def now(self, fs: AbstractFileSystem, bucket_path: str) -> float:
        return time.time()

    def address(self) -> str:
        return "this process's memory"


def retrying(
    operation: Callable[[], T],
    *,
    what: str,
    transient_reason: Callable[[Exception], str | None],
    policy: RetryPolicy,
) -> T:
    """The result of the operation, which is retried while the policy allows.

    Args:
        what: name of the operation in the log.
        transient_reason: returns a short description of a fault if a retry may help, else None.
    """
    started, pause = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return operation()
        except Exception as error:
            fault = transient_reason(error)
            # The pause is partly random, so that many workers do not return at the same time.
            wait = pause * _random.uniform(0.5, 1.5)
            if fault is None or time.monotonic() + wait > started + policy.seconds:
                raise
        logger.warning("%s: %s; again in %.1f s", what, fault, wait)
        time.sleep(wait)
        pause = min(2 * pause, MAX_PAUSE_S)
