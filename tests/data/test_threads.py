import os
import threading
import time

import pytest

from semix.data.machine import cores
from semix.data.threads import mapped, one_ahead


@pytest.mark.parametrize(("ahead", "num_ahead"), [(None, 6), (4, 4), (0, 0)])
def test_results_come_in_order_and_few_items_are_taken_ahead(ahead, num_ahead):
    items_taken = []

    def items():
        for number in range(100):
            items_taken.append(number)
            yield number

    def square(number: int) -> int:
        time.sleep(0.02 / (1 + number))  # the first is done last
        return number * number

    results = mapped(square, items(), threads=3, ahead=ahead)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(items_taken) == 5 + num_ahead
    assert list(results) == [number * number for number in range(5, 100)]


def test_work_goes_on_at_the_same_time():
    barrier = threading.Barrier(2, timeout=10)
    assert len(list(mapped(lambda _: barrier.wait(), range(2), threads=2))) == 2


def test_an_error_reaches_the_caller_at_its_place():
    results = mapped(lambda number: 1 // number, [1, 0, 1], threads=2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_who_stops_leaves_no_thread_and_no_work_to_begin():
    before, started, released = threading.active_count(), [], threading.Event()

    def work(number: int) -> None:
        started.append(number)
        if number:
            released.wait(10)

    results = mapped(work, range(100), threads=1, ahead=20)
    next(results)
    while len(started) < 2:
        time.sleep(0.001)
    threading.Timer(0.05, released.set).start()
    results.close()
    assert started == [0, 1]
    while threading.active_count() > before:  # the timer's
        time.sleep(0.001)


def test_one_item_is_made_while_the_one_before_is_in_use():
    making = [threading.Event() for _ in range(4)]

    def items():
        for number, event in enumerate(making):
            event.set()
            yield number

    results = one_ahead(items())
    assert next(results) == 0
    assert making[1].wait(10)
    assert not making[2].wait(0.1)
    assert list(results) == [1, 2, 3]


def test_an_error_ahead_reaches_the_caller_after_the_items_before_it():
    results = one_ahead(iter(1 // number for number in (1, -1, 0)))
    assert [next(results), next(results)] == [1, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize("num_taken", [1, 3])
def test_no_thread_is_left_by_who_stops(num_taken):
    before = threading.active_count()
    results = one_ahead(iter(range(3)))
    for _ in range(num_taken):
        next(results)
    assert threading.active_count() == before + 1
    results.close()
    assert threading.active_count() == before


def test_cores_are_counted_where_the_system_does_not_say_which_are_ours(monkeypatch):
    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1
