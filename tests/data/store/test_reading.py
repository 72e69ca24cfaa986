import io

import pytest

from data.store.objects import FIRST_RANGE, LONGEST_RANGE, RangeFile

CONTENT = bytes(1024) * 20_000  # about 20 MB


@pytest.fixture
def asked():
    return []


@pytest.fixture
def file(asked):
    def read(start, end):
        asked.append((start, end - start))
        return CONTENT[start:end]

    return io.BufferedReader(RangeFile(read, len(CONTENT)))


def test_who_reads_on_gets_longer_ranges(file, asked):
    assert file.read() == CONTENT
    lengths = [length for _, length in asked]
    assert lengths[:3] == [FIRST_RANGE, 2 * FIRST_RANGE, 4 * FIRST_RANGE]
    assert max(lengths) == LONGEST_RANGE and sum(lengths) == len(CONTENT)


def test_who_jumps_gets_short_ranges(file, asked):
    for start in (10_000_000, 5_000_000, 15_000_000):
        file.seek(start)
        assert len(file.read(1000)) == 1000
    assert asked == [(start, FIRST_RANGE) for start in (10_000_000, 5_000_000, 15_000_000)]


def test_positions_outside_the_file(file):
    file.seek(len(CONTENT) + 5)
    assert file.read(10) == b""
    with pytest.raises(ValueError, match="position -1 is before the file"):
        RangeFile(lambda start, end: b"", 10).seek(-1)
