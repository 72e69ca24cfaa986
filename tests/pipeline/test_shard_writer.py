"""Series that are encoded on threads are written in order, a few at a time; errors come out."""

import io
import threading
import time

import pytest

from semix.data.formats import SeriesRecord
from semix.data.tar import GroupSample, read_tar, write_tar
from semix.pipeline.shard_writer import MAX_QUEUED, ShardWriter, Stopwatch
from tests import handmade


def series(group: int) -> SeriesRecord:
    return handmade.series_of(handmade.record(group))


def images(group: int) -> list[bytes]:
    return [bytes([group]) * 100, bytes([group + 1]) * 50]


def test_the_tar_is_the_one_that_a_single_thread_writes():
    """Series that take longer to encode come no later in the tar."""
    threaded, plain = io.BytesIO(), io.BytesIO()
    clock = Stopwatch()
    with ShardWriter(threaded, extension="webp", clock=clock, threads=3) as writer:
        for group in range(20):

            def slow(group=group):
                time.sleep(0.02 if group % 3 == 0 else 0)
                return images(group)

            writer.add(series(group), slow)
    write_tar(plain, [GroupSample(series(g), images(g), "webp") for g in range(20)])
    assert threaded.getvalue() == plain.getvalue()
    assert clock.seconds["encode"] > 0.1
    threaded.seek(0)
    assert [sample.record.group for sample in read_tar(threaded)] == list(range(20))


def test_what_waits_is_bounded():
    """No more series are accepted while the encoders are blocked."""
    release, done = threading.Event(), []

    def blocked():
        release.wait(30)
        return images(1)

    def feed(writer):
        for group in range(40):
            writer.add(series(group), blocked)
            done.append(group)

    with ShardWriter(io.BytesIO(), extension="webp", clock=Stopwatch(), threads=2) as writer:
        feeder = threading.Thread(target=feed, args=(writer,))
        feeder.start()
        time.sleep(0.5)
        # The writer waits for one more, and one was submitted but is not queued yet.
        assert len(done) <= 2 * MAX_QUEUED + 1
        release.set()
        feeder.join()
    assert len(done) == 40


def test_an_error_while_encoding_reaches_the_caller():
    def broken():
        raise OSError("no such codec")

    with (
        pytest.raises(OSError, match="no such codec"),
        ShardWriter(io.BytesIO(), extension="webp", clock=Stopwatch(), threads=1) as writer,
    ):
        writer.add(series(0), broken)
        for group in range(1, 100):
            writer.add(series(group), lambda: images(0))


def test_a_file_that_takes_no_more_bytes_reaches_the_caller():
    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(28, "No space left on device")

    with (
        pytest.raises(OSError, match="No space left"),
        ShardWriter(Full(), extension="webp", clock=Stopwatch(), threads=1) as writer,
    ):
        writer.add(series(0), lambda: images(0))


def test_leaving_by_an_exception_stops_the_threads():
    before = set(threading.enumerate())
    with (
        pytest.raises(KeyboardInterrupt),
        ShardWriter(io.BytesIO(), extension="webp", clock=Stopwatch(), threads=2) as writer,
    ):
        for group in range(8):
            writer.add(series(group), lambda: images(0))
        raise KeyboardInterrupt
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(threading.enumerate()) <= before
