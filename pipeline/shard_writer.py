"""Write series to a shard: encode on threads, write in order, publish, commit."""

import hashlib
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Full, Queue
from typing import Any, BinaryIO

from semix.data.formats import (
    CommitRecord,
    File,
    SeriesRecord,
    ShardStage,
    features_name,
    spec_digest,
    tar_name,
)
from semix.data.machine import cores
from semix.data.root import Root
from semix.data.tar import GroupSample, write_tar

MAX_QUEUED = 4  # series per encoding thread in progress, which bounds memory
MAX_THREADS = 8  # lossless WebP of 512 px takes 6 ms: more than any GPU keeps busy


def encoding_threads() -> int:
    """Number of encoding threads, which leaves one core to the generator."""
    return min(MAX_THREADS, max(1, cores() - 1))


class Stopwatch:
    """Adds up the seconds of named stages; `wall` is the time since construction."""

    def __init__(self) -> None:
        self.seconds: dict[ShardStage, float] = defaultdict(float)
        self._start = time.perf_counter()
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, name: ShardStage) -> Iterator[None]:
        start = time.perf_counter()
        yield
        with self._lock:
            self.seconds[name] += time.perf_counter() - start

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._start


class ShardWriter:
    """Writes one tar; leaving the block by an exception stops the threads.

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
        threads = threads or encoding_threads()
        self._file = file
        self._extension = extension
        self._clock = clock
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._queue: Queue[tuple[SeriesRecord, Future[list[bytes]]] | None] = Queue(
            MAX_QUEUED * threads
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="write", daemon=True)

    def __enter__(self) -> "ShardWriter":
        self._thread.start()
        return self

    def add(self, record: SeriesRecord, encode: Callable[[], list[bytes]]) -> None:
        """Queue one series; waits while too many are in progress.

        Raises:
            Exception: any error of an earlier series on its thread.
        """
        with self._clock.stage("stall"):
            self._put((record, self._pool.submit(self._encode_timed, encode)))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self._stop_threads()
            return
        with self._clock.stage("stall"):
            self._put(None)
            self._thread.join()
        self._pool.shutdown()
        self._raise_error()

    def _stop_threads(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        while self._thread.is_alive():
            with suppress(Full):
                self._queue.put(None, timeout=0.1)  # behind cancelled and finished series
            self._thread.join(timeout=0.1)

    def _put(self, item: tuple[SeriesRecord, Future[list[bytes]]] | None) -> None:
        while True:
            self._raise_error()
            try:
                return self._queue.put(item, timeout=1.0)
            except Full:
                continue  # check again whether the writer has failed

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _encode_timed(self, encode: Callable[[], list[bytes]]) -> list[bytes]:
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


def publish_shard(
    root: Root, shard: int, staged: Path, features: bytes, *, clock: Stopwatch, **fields: Any
) -> CommitRecord:
    """Publish a complete tar and its features, then the commit record last.

    Args:
        features: a safetensors file of the series' CLIP features.
        fields: of the record: `groups`, `first`, `wall_seconds`, `versions` and more.
    """
    with clock.stage("write"):
        with staged.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        tar, size = tar_name(shard, digest), staged.stat().st_size
        root.store.publish(staged, tar)
        sha256 = hashlib.sha256(features).hexdigest()
        features_file = File(name=features_name(shard, sha256), sha256=sha256, bytes=len(features))
        root.store.put(features_file.name, features)
    input_digests = root.input_digests()
    record = CommitRecord(
        spec=spec_digest(root.plan.digest, shard),
        shard=shard,
        tar=tar,
        sha256=digest,
        bytes=size,
        features=features_file,
        seconds=dict(clock.seconds),
        attempt=1 + root.attempts(shard),
        worker=f"{socket.gethostname()}:{os.getpid()}",
        prototypes=input_digests.get("prototypes", ""),
        pairs=input_digests.get("pairs", ""),
        **fields,
    )
    root.commit(record)
    return record
