"""One part of several, as `1/4`: a contiguous block of shards."""

import re
from dataclasses import dataclass

from data.errors import InputError


@dataclass(frozen=True)
class Part:
    """Part `index` of `of`; counted from 0."""

    index: int
    of: int

    def bounds(self, total: int) -> tuple[int, int]:
        """First number and the one behind the last; parts differ by at most one in size."""
        return self.index * total // self.of, (self.index + 1) * total // self.of

    def others(self) -> list["Part"]:
        """The other parts, beginning with the next one: each part begins elsewhere."""
        return [Part((self.index + step) % self.of, self.of) for step in range(1, self.of)]

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


WHOLE = Part(0, 1)


def parse_part(text: str) -> Part:
    """`1/4` is the second of four; empty is the whole. Raises InputError for anything else."""
    if not text:
        return WHOLE
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if not found or int(found[1]) >= int(found[2]):
        raise InputError("range", text, "write i/n with i from 0 to n - 1, such as 0/4 ... 3/4")
    return Part(int(found[1]), int(found[2]))
