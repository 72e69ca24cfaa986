"""Threads that compute results ahead of their consumer, in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import repeat
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def mapped(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    ahead: int | None = None,
) -> Generator[Result, None, None]:
    """Like `map`, on threads; memory does not grow with the number of items.

    When it is closed early, or after an error, no further item is begun, and no thread is left.

    Args:
        ahead: results begun while the last one is in use; by default two per thread.
    """
    ahead = 2 * threads if ahead is None else ahead
    pool, begun = ThreadPoolExecutor(threads), deque[Future[Result]]()
    try:
        for item in items:
            begun.append(pool.submit(work, item))
            if len(begun) > ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def one_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The same items, while a thread prepares the next one, and no more; no item may be None.

    The thread ends after the last item, or when the generator is closed.
    """
    results = mapped(lambda _: next(items, None), repeat(None), threads=1, ahead=1)
    with closing(results):
        for item in results:
            if item is None:
                return
            yield item
