"""Work on threads that stays in order and within bounds."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from pipeline.audit.stream import in_order


def test_results_keep_their_order_and_only_some_wait():
    drawn: list[int] = []

    def calls() -> Iterator[Callable[[], int]]:
        for number in range(20):
            drawn.append(number)
            yield partial(slow_at_first, number)

    with ThreadPoolExecutor(4) as pool:
        found = in_order(pool, calls(), ahead=5)
        assert next(found) == 0
        assert drawn == [0, 1, 2, 3, 4]
        assert list(found) == list(range(1, 20))


def slow_at_first(number: int) -> int:
    time.sleep(0.02 / (1 + number))
    return number


def test_an_error_comes_at_its_place():
    def calls() -> Iterator[Callable[[], int]]:
        yield lambda: 1
        yield lambda: 1 // 0

    with ThreadPoolExecutor(2) as pool:
        found = in_order(pool, calls(), ahead=2)
        assert next(found) == 1
        with pytest.raises(ZeroDivisionError):
            next(found)
