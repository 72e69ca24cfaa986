"""What differs between object services: the protocol of s3.py, gs.py and memory.py."""

from dataclasses import dataclass
from typing import Any, Protocol

from fsspec import AbstractFileSystem

from data.errors import InputError
from data.store.backend import Fact
from data.store.retries import Patience


@dataclass(frozen=True)
class Upload:
    """An upload in parts that was begun and not completed; its key is base/name."""

    name: str
    id: str
    fact: Fact


class Service(Protocol):
    """A module; `fs` is what its `connect` gave, `base` is bucket/prefix."""

    SHARED: bool

    def connect(self, patience: Patience) -> AbstractFileSystem: ...

    def heals(self, error: Exception) -> str | None:
        """The fault's name if another attempt may succeed."""
        ...

    def told(self, error: Exception, url: str, where: str) -> Exception:
        """The error as our callers know it, its text free of secrets."""
        ...

    def modified(self, info: dict[str, Any]) -> float: ...

    def mark(self, token: str) -> dict[str, Any]:
        """Arguments of a write that leave a token with the object."""
        ...

    def written_by(self, fs: AbstractFileSystem, path: str) -> str | None:
        """The token that was left with the object."""
        ...

    def now(self, fs: AbstractFileSystem, base: str) -> float: ...

    def unfinished(self, fs: AbstractFileSystem, base: str) -> list[Upload]: ...

    def abort(self, fs: AbstractFileSystem, base: str, upload: Upload) -> None: ...

    def address(self) -> str:
        """Where requests go, for messages."""
        ...


def service_of(protocol: str, url: str) -> Service:
    """The service's module.

    Raises:
        InputError: the package that it needs is not installed.
    """
    try:
        if protocol == "s3":
            from data.store import s3

            return s3
        if protocol == "gs":
            from data.store import gs

            return gs
    except ModuleNotFoundError:
        package = {"s3": "s3fs", "gs": "gcsfs"}[protocol]
        remedy = f"needs {package}: pip install 'semix[{protocol}]'"
        raise InputError("url", url, remedy) from None
    from data.store import memory

    return memory
