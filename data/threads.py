"""Work on many items ahead of who takes the results, in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def mapped(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int
) -> Iterator[Result]:
    """As `map`, on threads; memory does not grow with the number of items."""
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[Result]] = deque()
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def one_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The same items, none of them None; a thread makes the next one while the last is in use.

    No item beyond that one is asked for. The thread ends with the items, and when this is closed.
    """
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
