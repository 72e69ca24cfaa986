import threading

import pytest

from data.threads import mapped


def test_results_come_in_order_and_few_items_are_taken_ahead():
    taken = []

    def items():
        for number in range(100):
            taken.append(number)
            yield number

    results = mapped(lambda number: number * number, items(), threads=3)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(taken) <= 5 + 2 * 3 + 1
    assert list(results) == [number * number for number in range(5, 100)]


def test_work_goes_on_at_the_same_time():
    both = threading.Barrier(2, timeout=10)
    assert len(list(mapped(lambda _: both.wait(), range(2), threads=2))) == 2


def test_an_error_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        list(mapped(lambda number: 1 // number, [1, 0, 1], threads=2))
