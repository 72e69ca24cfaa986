"""Work on many items ahead of who takes the results, in order."""

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
    """As `map`, on threads; memory does not grow with the number of items.

    Closed early, and after an error, nothing more is begun, and no thread is left.

    Args:
        ahead: results that are begun while the last one is in use; two a thread by default.
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
    """The same items, none of them None; a thread makes the next one while the last is in use.

    No item beyond that one is asked for. The thread ends with the items, and when this is closed.
    """
    made = mapped(lambda _: next(items, None), repeat(None), threads=1, ahead=1)
    with closing(made):
        for item in made:
            if item is None:
                return
            yield item
