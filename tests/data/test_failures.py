import pytest

from data.failures import Failures, failure_name
from data.shard_numbers import ShardNumbers
from data.store import Store
from tests.data.whole_roots import Counting

NOTE = {"error": "ValueError", "message": "group 3: flat", "time": 1.0}


@pytest.fixture
def store(tmp_path):
    found = Store(str(tmp_path))
    failures = Failures(found)
    for shard in (1, 1, 2, 1005, 4000):
        failures.add(shard, NOTE)
    return found


def test_attempts_are_counted_without_reading_them(store):
    counting = Counting(store)
    found = Failures(counting).of_missing(ShardNumbers([0, 1, 1005, 2000]))
    assert {shard: len(tries) for shard, tries in found.items()} == {1: 2, 1005: 1}
    assert (found.shards, 2 in found, list(found)) == ([1, 1005], False, [1, 1005])
    # Which folders there are; those of missing shards alone are listed.
    assert counting.calls == {"scan": 1 + 2}
    assert [attempt["attempt"] for attempt in found[1]] == [1, 2]
    assert found[1][-1]["attempt"] == 2
    with pytest.raises(KeyError):
        found[2]


def test_all_are_read_together(store):
    counting = Counting(store)
    found = Failures(counting).of_missing(ShardNumbers(range(5000)))
    assert [(shard, len(tries)) for shard, tries in found.read()] == [
        (1, 2),
        (2, 1),
        (1005, 1),
        (4000, 1),
    ]
    assert counting.calls["get"] == 5


def test_a_shard_of_which_no_record_can_be_read_still_failed(store):
    store.put(failure_name(2, 1), b"{")
    found = Failures(store).of_missing(ShardNumbers([2, 4000]))
    store.delete(failure_name(4000, 1))  # made since, and swept
    assert [tries[0]["message"].partition(": ")[0] for _, tries in found.read()] == [
        "failed/0000/0000002.1.json",
        "failed/0004/0004000.1.json",
    ]
    assert found[2][-1]["attempt"] == 1
    assert Failures(store).attempts(2) == 1
