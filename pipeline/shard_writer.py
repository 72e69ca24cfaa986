"""Write series to a shard: encode on threads, write in order, publish, commit."""

import hashlib
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from semix.data.features import publish_features
from semix.data.formats import (
    SHARDS,
    CommitRecord,
    SeriesRecord,
    ShardStage,
    spec_digest,
    tar_name,
)
from semix.data.machine import cores
from semix.data.root import Root
from semix.data.tar import GroupSample, write_tar
from semix.data.threads import mapped

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
        start = self.wall
        yield
        self.add(name, self.wall - start)

    def add(self, name: ShardStage, seconds: float) -> None:
        with self._lock:
            self.seconds[name] += seconds

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._start


def write_series(
    file: BinaryIO,
    series: Iterable[tuple[SeriesRecord, Callable[[], list[bytes]]]],
    *,
    extension: str,
    clock: Stopwatch,
    threads: int | None = None,
) -> None:
    """Write a tar of series, in order, whose images are encoded on threads while others are made.

    Args:
        series: the record of each, and the call that encodes its images.
        extension: of the images.
    Raises:
        Exception: any error of a series, of its encoding, or of the file; no thread is left.
    """

    def encoded(item: tuple[SeriesRecord, Callable[[], list[bytes]]]) -> GroupSample:
        record, encode = item
        with clock.stage("encode"):
            return GroupSample(record, encode(), extension)

    threads = threads or encoding_threads()
    samples = mapped(encoded, series, threads=threads, ahead=MAX_QUEUED * threads)
    with closing(samples):
        write_tar(file, samples)


def publish_shard(
    root: Root, shard: int, staged: Path, features: bytes, *, clock: Stopwatch, **fields: Any
) -> CommitRecord:
    """Publish a complete tar and its features, then the commit record last.

    Args:
        features: a safetensors file of the series' CLIP features.
        fields: of the record: `groups`, `first`, `wall_seconds`, `prototypes` and more.
    """
    with clock.stage("write"):
        with staged.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        tar, size = tar_name(shard, digest), staged.stat().st_size
        root.store.publish(staged, tar)
        file_of_features = publish_features(root.store, features, shard=shard, folder=SHARDS)
    record = CommitRecord(
        spec=spec_digest(root.plan.digest, shard),
        shard=shard,
        tar=tar,
        sha256=digest,
        bytes=size,
        features=file_of_features,
        seconds=dict(clock.seconds),
        attempt=1 + root.attempts(shard),
        worker=f"{socket.gethostname()}:{os.getpid()}",
        **fields,
    )
    root.commit(record)
    return record
