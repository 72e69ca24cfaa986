"""Shard numbers as a user types them: lists such as `3,7-9`, and partitions such as `1/4`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from semix.data.errors import InputError

MAX_NUMBERS = 10**7  # in a list; no root has more shards
MAX_NUMBER = 2**31 - 1


def parse_ranges(text: str) -> list[int]:
    """`3,7-9` -> 3, 7, 8, 9, ascending. Raises InputError for anything else."""
    spans = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(n.isdecimal() and len(n) < 20 for n in numbers) or int(first) > int(numbers[1]):
            raise InputError("shards", text, "write numbers and ranges such as 3,7-9")
        spans.append((int(numbers[0]), int(numbers[1]) + 1))
    if (
        sum(end - start for start, end in spans) > MAX_NUMBERS
        or max(end for _, end in spans) > MAX_NUMBER
    ):
        raise InputError(
            "shards", text, f"names too many shards, or too large numbers; at most {MAX_NUMBERS:,}"
        )
    return sorted({number for span in spans for number in range(*span)})


def format_ranges(numbers: Iterable[int]) -> str:
    """[3, 7, 8, 9] -> `3,7-9`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True)
class Partition:
    """Partition number `index`, from 0, of `of` partitions."""

    index: int
    of: int

    def bounds(self, total: int) -> tuple[int, int]:
        """First number and the one after the last; sizes of partitions differ by at most one."""
        return self.index * total // self.of, (self.index + 1) * total // self.of

    def others(self) -> list["Partition"]:
        """The other partitions, from the next one on; the order differs between partitions."""
        return [Partition((self.index + step) % self.of, self.of) for step in range(1, self.of)]

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


WHOLE = Partition(0, 1)


def parse_partition(text: str) -> Partition:
    """`1/4` is the second of four; an empty text is all. Raises InputError for another text."""
    if not text:
        return WHOLE
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if not match or int(match[1]) >= int(match[2]):
        raise InputError("range", text, "write i/n with i from 0 to n - 1, such as 0/4 ... 3/4")
    return Partition(int(match[1]), int(match[2]))
