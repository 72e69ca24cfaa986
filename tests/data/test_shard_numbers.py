import numpy as np
import pytest

from data.shard_numbers import ShardNumbers


def test_numbers_ascend_without_repeats_and_compare_with_others():
    found = ShardNumbers([9, 3, 7, 8, 3])
    assert found == [3, 7, 8, 9] == list(found)
    assert found == {3, 7, 8, 9} and found == ShardNumbers((3, 7, 8, 9))
    assert found != [3, 7, 8] and found != {3, 7, 8, 10} and found != "3789"
    assert ShardNumbers() == [] and not ShardNumbers()
    assert list(reversed(found)) == [9, 8, 7, 3]
    assert (found[0], found[-1], found[1:3]) == (3, 9, [7, 8])
    assert (7 in found, 4 in found, "7" in found) == (True, False, False)
    assert all(type(number) is int for number in (*found, found[0]))
    with pytest.raises(ValueError, match=r"walk them with reversed\(\)"):
        found[::-1]


def test_sets_of_numbers():
    some, others = ShardNumbers(range(5)), ShardNumbers([3, 4, 9])
    assert (some & others, some | others, some - others) == ([3, 4], [0, 1, 2, 3, 4, 9], [0, 1, 2])
    assert some - {0, 1} == [2, 3, 4] and some & range(2, 9) == [2, 3, 4]
    assert some.between(1, 3) == [1, 2] and some.between(3, 1) == []
    assert list(others.runs()) == [(3, 4), (9, 9)]
    assert list(ShardNumbers().runs()) == []
    assert repr(others) == "ShardNumbers(3-4,9)"


def test_stretches_that_overlap_or_follow():
    assert ShardNumbers.spans([(7, 9), (2, 4), (8, 10)]) == [2, 3, 7, 8, 9]
    arrays = (np.arange(start, start + 2, dtype=np.int32) for start in (0, 5))
    assert ShardNumbers.joined(arrays) == [0, 1, 5, 6]
    assert ShardNumbers.joined([]) == []
