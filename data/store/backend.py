"""What keeps a store's bytes: the protocol of its two kinds."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class Fact:
    """What a store says about one file.

    Attributes:
        bytes: its size.
        modified: when it got its content, UNIX seconds by the store's own clock.
    """

    bytes: int
    modified: float


class Backend(Protocol):
    """Files by name below one base. A name appears with its complete content or not at all."""

    url: str
    local: bool
    shared: bool
    parallel: int  # how many requests it answers at a time

    def get(self, name: str) -> bytes: ...

    def open(self, name: str) -> BinaryIO: ...

    def exists(self, name: str) -> bool: ...

    def fact(self, name: str) -> Fact: ...

    def scan(self, folder: str, suffix: str = "") -> tuple[dict[str, Fact], Sequence[str]]:
        """Files directly in a folder that end so, and its sub-folders; nothing if it is not
        there."""
        ...

    def names(self, folder: str) -> tuple[dict[str, None], Sequence[str]]:
        """As `scan`, where that is cheaper without facts."""
        ...

    def delete(self, name: str) -> None: ...

    def put(self, name: str, content: bytes) -> None: ...

    def create(self, name: str, content: bytes) -> bool: ...

    def staging(self, name: str) -> AbstractContextManager[Path]: ...

    def publish(self, partial: Path, name: str) -> None: ...

    def now(self) -> float: ...

    def partials(self) -> dict[str, Fact]:
        """What unfinished writes left, except those of living processes of this machine."""
        ...

    def sweep(self, *, before: float) -> int:
        """Remove partials last changed before then, and all of this machine's dead processes."""
        ...

    def refusal(self, error: OSError) -> str:
        """Why this place cannot be used, and what to do about it."""
        ...
