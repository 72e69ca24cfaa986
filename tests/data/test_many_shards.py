"""A root of 100,000 shards: a look takes little memory for each, and few requests."""

import tracemalloc
from collections.abc import Callable

from data.ranges import format_ranges, parse_ranges
from data.verify import damage
from flows.build_steps import Selection, gaps
from tests.simulated import PAGE, SimulatedShards, index_of, simulated

SHARDS, LACKING = 100_000, 300
SOME = 5_000  # where memory is traced, which takes its time


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
        assert root.missing() == list(range(2300, 2500))
        assert [p.kind for p in damage(root)] == ["prototypes"]  # there are none


def test_a_look_takes_few_bytes_a_shard():
    shards = SimulatedShards(SOME, SOME - LACKING, index=index_of(SOME - LACKING))
    with simulated(shards) as root:

        def look():
            assert root.status()["done"] == SOME - LACKING
            assert len(root.missing()) == len(Selection().wanted(root)) == LACKING
            assert [len(part) for part in gaps(root, (), allowed=None)] == [LACKING, 0]
            assert root.failures() == {}

        assert peak(look) < 2500 * SOME  # of which the index is 550


def test_requests_of_the_first_look_and_of_later_ones():
    folders = SHARDS // PAGE
    shards = SimulatedShards(SHARDS, SHARDS - LACKING, index=index_of(SHARDS - LACKING))
    with simulated(shards) as root:
        root.progress()
        pages = 3 * (folders - 1) + -(-3 * (PAGE - LACKING) // PAGE)
        # Besides these the folders of shards, tombstones, failures, extensions; indices; the plan.
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
        assert shards.requests == {"list": 3}  # folders, tombstones, failures


def test_verifying_what_an_index_knows_reads_no_record():
    shards = SimulatedShards(SOME, SOME, index=index_of(SOME))
    with simulated(shards) as root:
        found = []
        assert peak(lambda: found.extend(damage(root))) < 4000 * SOME
        assert [p.kind for p in found] == ["prototypes"]  # there are none
        assert shards.requests["get"] == 2 + 2  # plan and prototypes; the index, twice


def test_a_million_numbers_are_cheap():
    def look():
        every = parse_ranges("0-999999")
        assert (len(every), every[-1]) == (10**6, 10**6 - 1)
        assert format_ranges(n for n in every if n != 7) == "0-6,8-999999"

    assert peak(look) < 160 * 2**20
