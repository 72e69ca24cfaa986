"""A root of many shards: memory of a look that does not grow with them, requests that are few."""

import tracemalloc
from collections.abc import Callable

import pytest

from data.ranges import format_ranges, parse_ranges
from flows.selection import Selection, gaps
from tests.simulated import PAGE, SimulatedShards, index_of, simulated

SHARDS, LACKING = 20_000, 300


@pytest.fixture(scope="module")
def index():
    return index_of(SHARDS - LACKING)


@pytest.fixture
def shards(index):
    return SimulatedShards(SHARDS, SHARDS - LACKING, index=index)


def peak(work: Callable[[], object]) -> int:
    """Bytes that Python allocated at most, above what there was."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_simulation_holds_what_a_root_would_write():
    shards = SimulatedShards(2500, 2300)
    with simulated(shards) as root:
        assert root.write_index() == "index/0.json"
        assert shards.written["index/0.json"] == index_of(2300)
        assert root.missing() == range(2300, 2500)
        assert [p.kind for p in root.verify()] == ["prototypes"]  # there are none


def test_a_look_takes_few_bytes_a_shard(shards):
    with simulated(shards) as root:

        def look():
            assert root.status()["done"] == SHARDS - LACKING
            assert len(root.missing()) == len(Selection().wanted(root)) == LACKING
            assert [len(part) for part in gaps(root, (), allowed=None)] == [LACKING, 0]
            assert root.failures() == {}

        assert peak(look) < 12 * 2**20  # a dict of all names alone took 20


def test_requests_of_the_first_look_and_of_later_ones(shards):
    folders = SHARDS // PAGE
    with simulated(shards) as root:
        root.progress()
        pages = 3 * (folders - 1) + -(-3 * (PAGE - LACKING) // PAGE)
        # Besides these the folders of shards, tombstones, failures and indices; the plan.
        assert shards.requests == {"list": pages + 4 + 1, "get": 2}
        shards.requests.clear()
        root.progress()
        assert shards.requests == {"list": 3 + 3}  # the folder that is not full, in three pages
        shards.requests.clear()
        shards.done += 100
        assert root.progress().done == SHARDS - LACKING + 100
        assert shards.requests["get"] == 100
        shards.done = SHARDS
        assert root.missing() == []
        shards.requests.clear()
        assert root.progress().done == SHARDS
        assert shards.requests == {"list": 2}  # tombstones, failures


def test_verifying_what_an_index_knows_reads_no_part(shards):
    with simulated(shards) as root:
        found = []
        assert peak(lambda: found.extend(root.verify())) < 12 * 2**20
        assert [p.kind for p in found] == ["prototypes"]  # there are none
        assert shards.requests["get"] == 2 + 2  # plan and prototypes; the index, twice


def test_a_million_numbers_are_cheap():
    def look():
        every = parse_ranges("0-999999")
        assert (len(every), 999_999 in every, 10**6 in every) == (10**6, True, False)
        odd = every[1::2]
        assert format_ranges(every - [7]) == "0-6,8-999999"
        assert (odd & every) == odd and len(every - odd) == 500_000

    assert peak(look) < 64 * 2**20
