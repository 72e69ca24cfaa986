import threading

import pytest

from data.threads import mapped, one_ahead


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


def test_one_item_is_made_while_the_one_before_is_in_use():
    making = [threading.Event() for _ in range(4)]

    def items():
        for number, event in enumerate(making):
            event.set()
            yield number

    found = one_ahead(items())
    assert next(found) == 0
    assert making[1].wait(10)
    assert not making[2].wait(0.1)
    assert list(found) == [1, 2, 3]


def test_an_error_ahead_reaches_the_caller_after_the_items_before_it():
    found = one_ahead(iter(1 // number for number in (1, -1, 0)))
    assert [next(found), next(found)] == [1, -1]
    with pytest.raises(ZeroDivisionError):
        next(found)


@pytest.mark.parametrize("taken", [1, 3])
def test_no_thread_is_left_by_who_stops(taken):
    before = threading.active_count()
    found = one_ahead(iter(range(3)))
    for _ in range(taken):
        next(found)
    assert threading.active_count() == before + 1
    found.close()
    assert threading.active_count() == before
