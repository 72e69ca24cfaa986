"""Locations of stores, checks of their URLs and names, and the interface of a backend."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from semix.data.errors import InputError

PROTOCOLS = ("file", "s3", "gs", "memory")
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# In fsspec these stand for versions, queries, fragments and globs.
SPECIAL = re.compile(r"[?#*\\]")


@dataclass(frozen=True)
class StoreLocation:
    """Where a store lives.

    Attributes:
        base: an absolute local path, or bucket/prefix without a slash at its end.
        url: the URL that is shown and stored; it has no secret.
    """

    protocol: str
    base: str
    url: str


@dataclass(frozen=True)
class FileInfo:
    """Size and time of one file, as a store reports them.

    Attributes:
        bytes: its size.
        modified: time of the last write, UNIX seconds by the store's own clock.
    """

    bytes: int
    modified: float


class Backend(Protocol):
    """Files by name below one base. A name appears with its complete content or not at all."""

    url: str
    local: bool
    shared: bool
    parallel: int  # number of requests that it answers at a time

    def get(self, name: str, max_bytes: int) -> bytes:
        """The content of a file. Raises TooLarge for more than `max_bytes` bytes."""
        ...

    def open(self, name: str) -> BinaryIO: ...

    def exists(self, name: str) -> bool: ...

    def info(self, name: str) -> FileInfo: ...

    def scan(self, folder: str, suffix: str = "") -> tuple[dict[str, FileInfo], Sequence[str]]:
        """Files directly in a folder whose names end in `suffix`, and its sub-folders."""
        ...

    def names(self, folder: str) -> tuple[dict[str, None], Sequence[str]]:
        """As `scan`, but without sizes and times, which is cheaper for some backends."""
        ...

    def delete(self, name: str) -> None: ...

    def put(self, name: str, content: bytes) -> None: ...

    def create(self, name: str, content: bytes) -> bool: ...

    def staging(self, name: str) -> AbstractContextManager[Path]: ...

    def publish(self, partial: Path, name: str) -> None: ...

    def now(self) -> float: ...

    def partials(self) -> dict[str, FileInfo]:
        """Leftovers of unfinished writes, except those of living processes of this machine."""
        ...

    def sweep(self, *, before: float) -> int:
        """Remove partials last changed before this time, and all of dead local processes."""
        ...

    def refusal(self, error: OSError) -> str:
        """The remedy of an InputError: why the location cannot be used, and what to do."""
        ...


def parse_url(url: str) -> StoreLocation:
    """The location that a URL or a local path names.

    Raises:
        InputError: another protocol, a chained URL, credentials or a query in it, `..`.
    """
    _check_characters(url)
    if "://" not in url:
        return _local(url)
    protocol, _, path = url.partition("://")
    if protocol not in PROTOCOLS:
        raise _error(url, f"use one of {', '.join(PROTOCOLS)}")
    if protocol == "file":
        if not path.startswith("/"):
            raise _error(url, "write file:///absolute/path, or the path alone")
        return _local(path)
    return _remote(protocol, path.rstrip("/"), url)


def check_name(name: str) -> str:
    """Return the name.

    Raises:
        ValueError: it could lead out of the store: absolute, `..`, empty names, odd characters.
    """
    parts = name.split("/")
    if CONTROL.search(name) or SPECIAL.search(name) or {"", ".", ".."} & set(parts):
        raise ValueError(f"{name!r} is not a name within a store")
    return name


def check_folder(folder: str) -> str:
    return check_name(folder) if folder else folder


def printable_url(url: str) -> str:
    """A URL without user, password and query, which may be secret."""
    protocol, separator, location = url.partition("://")
    if not separator:
        return CONTROL.sub("?", url)
    location = re.split(r"[?#]", location)[0].rpartition("@")[2]
    return CONTROL.sub("?", f"{protocol}://{location}")


def _check_characters(url: str) -> None:
    if not url:
        raise _error(url, "give a local path or a URL")
    if CONTROL.search(url):
        raise _error(url, "has control characters")
    if "::" in url:
        raise _error(url, f"chained URLs are not used; use one of {', '.join(PROTOCOLS)}")


def _local(path: str) -> StoreLocation:
    absolute = str(Path(path).absolute())
    return StoreLocation("file", absolute, absolute)


def _remote(protocol: str, path: str, url: str) -> StoreLocation:
    if "@" in path:
        raise _error(url, "no user or password in a URL; credentials come from the environment")
    if SPECIAL.search(path):
        raise _error(url, "no query, fragment, * or \\ in a URL")
    bucket, *prefix = path.lstrip("/").split("/") if protocol == "memory" else path.split("/")
    if protocol != "memory" and not BUCKET.fullmatch(bucket):
        raise _error(url, f"write {protocol}://BUCKET/FOLDER")
    if {"", ".", ".."} & set(prefix):
        raise _error(url, "no empty names, . or .. in a URL")
    return StoreLocation(protocol, path, f"{protocol}://{path}")


def _error(url: str, remedy: str) -> InputError:
    return InputError("url", printable_url(url), remedy)
