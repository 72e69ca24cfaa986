"""Lists of shard numbers as a person types them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from data.errors import InputError

if TYPE_CHECKING:  # numpy costs a tenth of a second that a command's help need not wait for
    from data.shard_numbers import ShardNumbers

MOST = 10**7  # numbers in one list; no root has more shards
LAST = 2**31 - 1


def parse_ranges(text: str) -> "ShardNumbers":
    """`3,7-9` -> 3, 7, 8, 9. Raises InputError for anything else."""
    from data.shard_numbers import ShardNumbers

    spans = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(n.isdecimal() and len(n) < 20 for n in numbers) or int(first) > int(numbers[1]):
            raise InputError("shards", text, "write numbers and ranges such as 3,7-9")
        spans.append((int(numbers[0]), int(numbers[1]) + 1))
    if sum(end - start for start, end in spans) > MOST or max(end for _, end in spans) > LAST:
        raise InputError("shards", text, f"names too many, or too large ones; at most {MOST:,}")
    return ShardNumbers.spans(spans)


def format_ranges(numbers: Iterable[int]) -> str:
    """[3, 7, 8, 9] -> `3,7-9`."""
    from data.shard_numbers import ShardNumbers

    found = numbers if isinstance(numbers, ShardNumbers) else ShardNumbers(numbers)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found.runs())
