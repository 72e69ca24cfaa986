"""Series that are encoded on threads are written in order, a few at a time; errors come out."""

import io
import threading
import time
from functools import partial

import pytest

from semix.data.formats import SeriesRecord
from semix.data.tar import GroupSample, read_tar, write_tar
from semix.pipeline.shard_writer import MAX_QUEUED, Stopwatch, write_series
from tests import handmade


def series(group: int) -> SeriesRecord:
    return handmade.series_of(handmade.record(group))


def images(group: int) -> list[bytes]:
    return [bytes([group]) * 100, bytes([group + 1]) * 50]


def test_the_tar_is_the_one_that_a_single_thread_writes():
    """Series that take longer to encode come no later in the tar."""
    threaded, plain, clock = io.BytesIO(), io.BytesIO(), Stopwatch()

    def slow(group: int) -> list[bytes]:
        time.sleep(0.02 if group % 3 == 0 else 0)
        return images(group)

    all_series = ((series(group), partial(slow, group)) for group in range(20))
    write_series(threaded, all_series, extension="webp", clock=clock, threads=3)
    write_tar(plain, [GroupSample(series(g), images(g), "webp") for g in range(20)])
    assert threaded.getvalue() == plain.getvalue()
    assert clock.seconds["encode"] > 0.1
    threaded.seek(0)
    assert [sample.record.group for sample in read_tar(threaded)] == list(range(20))


def test_what_waits_is_bounded():
    """No more series are made while the encoders are blocked."""
    release, made = threading.Event(), []

    def blocked() -> list[bytes]:
        release.wait(30)
        return images(1)

    def all_series():
        for group in range(40):
            made.append(group)
            yield series(group), blocked

    def write():
        write_series(io.BytesIO(), all_series(), extension="webp", clock=Stopwatch(), threads=2)

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.5)
    assert len(made) <= 2 * MAX_QUEUED + 1
    release.set()
    writer.join()
    assert len(made) == 40


def write_with(file: io.BytesIO, *encodings) -> None:
    all_series = ((series(group), encode) for group, encode in enumerate(encodings))
    write_series(file, all_series, extension="webp", clock=Stopwatch(), threads=1)


def test_an_error_while_encoding_reaches_the_caller():
    def broken():
        raise OSError("no such codec")

    with pytest.raises(OSError, match="no such codec"):
        write_with(io.BytesIO(), broken, *[lambda: images(0)] * 99)


def test_a_file_that_takes_no_more_bytes_reaches_the_caller():
    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_with(Full(), lambda: images(0))


def test_an_error_between_series_stops_the_threads():
    before = set(threading.enumerate())

    def interrupted():
        for group in range(8):
            yield series(group), lambda: images(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_series(io.BytesIO(), interrupted(), extension="webp", clock=Stopwatch(), threads=2)
    assert set(threading.enumerate()) <= before
