"""Objects in this process's memory: for tests."""

import time
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from data.store.retries import Patience
from data.store.service import Upload

SHARED = False


def connect(patience: Patience) -> AbstractFileSystem:
    return MemoryFileSystem()


def heals(error: Exception) -> str | None:
    return None


def told(error: Exception, url: str, where: str) -> Exception:
    return error


def modified(info: dict[str, Any]) -> float:
    created = info["created"]
    return created if isinstance(created, float) else created.timestamp()


def mark(token: str) -> dict[str, Any]:
    return {}


def written_by(fs: AbstractFileSystem, path: str) -> str | None:
    return None


def now(fs: AbstractFileSystem, base: str) -> float:
    return time.time()


def unfinished(fs: AbstractFileSystem, base: str) -> list[Upload]:
    return []


def abort(fs: AbstractFileSystem, base: str, upload: Upload) -> None:
    raise AssertionError("nothing is ever unfinished here")


def address() -> str:
    return "this process's memory"
