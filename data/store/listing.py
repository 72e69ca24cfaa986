"""Many folders and files at a time: waiting for a server is done in parallel."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
BATCH = 64  # names a thread takes at a time, where there are many


def walk(
    scan: Callable[[str], tuple[dict[str, T], Sequence[str]]], folder: str, *, parallel: int
) -> dict[str, T]:
    """All files below a folder in the order of their names, one level of folders at a time."""
    found: dict[str, T] = {}
    folders: list[str] = [folder]
    with _threads(parallel) as pool:
        while folders:
            below: list[str] = []
            for files, inner in pool.map(scan, folders):
                found.update(files)
                below.extend(inner)
            folders = below
    return dict(sorted(found.items()))


def read_many(
    get: Callable[[str], bytes], names: Sequence[str], *, parallel: int
) -> dict[str, bytes]:
    """Contents by name, in the order asked for; names that are not there are left out."""

    def read(batch: Sequence[str]) -> list[tuple[str, bytes]]:
        contents = []
        for name in batch:
            try:
                contents.append((name, get(name)))
            except FileNotFoundError:
                continue
        return contents

    size = min(BATCH, -(-len(names) // parallel)) or 1
    batches = [names[start : start + size] for start in range(0, len(names), size)]
    with _threads(parallel) as pool:
        return dict(found for batch in pool.map(read, batches) for found in batch)


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)  # after an error nobody wants the rest
