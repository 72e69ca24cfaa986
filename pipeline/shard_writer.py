"""Encode series on threads and write them into one tar, in order, while others are made."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Full, Queue
from typing import Any, BinaryIO

from data.shards import GroupSample, write_tar
from pipeline.stopwatch import Stopwatch

WAITING = 4  # series a thread: what may be encoded or wait for it, so that memory is bounded
MOST_THREADS = 8  # lossless WebP of 512 px takes 6 ms: more than any GPU keeps busy


def encoder_threads() -> int:
    """One core is left to whoever generates."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MOST_THREADS, max(1, (cores or 1) - 1))


class ShardWriter:
    """One tar being written; leaving the block by an exception stops the threads.

    Args:
        extension: of the images.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        extension: str,
        clock: Stopwatch,
        threads: int | None = None,
    ) -> None:
        threads = threads or encoder_threads()
        self._file = file
        self._extension = extension
        self._clock = clock
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._queue: Queue[tuple[dict[str, Any], Future[list[bytes]]] | None] = Queue(
            WAITING * threads
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="write", daemon=True)

    def __enter__(self) -> "ShardWriter":
        self._thread.start()
        return self

    def add(self, record: dict[str, Any], encode: Callable[[], list[bytes]]) -> None:
        """Hand over one series; waits while too many are under way.

        Raises:
            Exception: whatever an earlier series ran into on its thread.
        """
        with self._clock.stage("stall"):
            self._put((record, self._pool.submit(self._timed, encode)))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self._abandon()
            return
        with self._clock.stage("stall"):
            self._put(None)
            self._thread.join()
        self._pool.shutdown()
        self._raise()

    def _abandon(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        while self._thread.is_alive():
            with suppress(Full):
                self._queue.put(None, timeout=0.1)  # after what it has left, all cancelled or done
            self._thread.join(timeout=0.1)

    def _put(self, item: tuple[dict[str, Any], Future[list[bytes]]] | None) -> None:
        while True:
            self._raise()
            try:
                return self._queue.put(item, timeout=1.0)
            except Full:
                continue  # look again whether the writer still lives

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _timed(self, encode: Callable[[], list[bytes]]) -> list[bytes]:
        with self._clock.stage("encode"):
            return encode()

    def _write(self) -> None:
        try:
            write_tar(self._file, self._samples())
        except BaseException as error:
            self._error = error

    def _samples(self) -> Iterator[GroupSample]:
        while (item := self._queue.get()) is not None:
            record, images = item
            yield GroupSample(record, images.result(), self._extension)
