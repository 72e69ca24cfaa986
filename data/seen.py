"""What is remembered of one folder of commit records: seventeen bytes a shard at most."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.indices import records_digest
from data.schemas import PER_FOLDER
from data.store import Fact
from data.sums import Sums


@dataclass(frozen=True)
class Listing:
    """What a store says of one folder's commit records.

    Attributes:
        facts: of the records that are there, by shard, ascending.
        gone: how often shards were discarded, of those that ever were.
    """

    number: int
    facts: dict[int, Fact]
    gone: dict[int, int]

    @cached_property
    def digest(self) -> str:
        """As an index keeps it of a part that knows just these records."""
        gone = self.gone
        return records_digest((s, fact.bytes, gone.get(s, 0)) for s, fact in self.facts.items())


class Seen:
    """A folder as of the last look.

    Attributes:
        digest: of what was listed.
        complete: whether all shards count that the plan has here; then it need not be listed
            again unless one is discarded.
        sums: over the shards that count.

    Args:
        known: shards whose records are known, whether they count or not.
        planned: how many shards of the plan are in this folder.
    """

    def __init__(
        self, listing: Listing, *, known: Iterable[int], counting: Iterable[int], sums: Sums,
        planned: int,
    ) -> None:  # fmt: skip
        self.number, self.sums, self._planned = listing.number, sums, planned
        self._bytes = np.full(PER_FOLDER, -1, np.int64)  # -1 where no record is known
        self._modified = np.zeros(PER_FOLDER)
        self._counts = np.zeros(PER_FOLDER, bool)
        self._learn(listing, known, counting)

    def numbers(self) -> np.ndarray:
        """The shards that count."""
        start = self.number * PER_FOLDER
        if self.complete:
            return np.arange(start, start + self._planned, dtype=np.int32)
        return (start + np.flatnonzero(self._counts)).astype(np.int32)

    def lacking(self) -> np.ndarray:
        """Those of the plan that do not."""
        if self.complete:
            return np.empty(0, np.int32)
        places = np.flatnonzero(~self._counts[: self._planned])
        return (self.number * PER_FOLDER + places).astype(np.int32)

    def news(self, listing: Listing) -> list[int] | None:
        """Listed shards that must be read; None if one that counted is not as it was."""
        if self.complete or listing.gone != self.gone:
            return None
        start, same = self.number * PER_FOLDER, np.zeros(PER_FOLDER, bool)
        for shard, fact in listing.facts.items():
            place = shard - start
            same[place] = fact == Fact(int(self._bytes[place]), float(self._modified[place]))
        if (self._counts & ~same).any():
            return None
        return [shard for shard in listing.facts if not same[shard - start]]

    def add(
        self, listing: Listing, *, known: Iterable[int], counting: Iterable[int], sums: Sums
    ) -> None:
        """Records that are new."""
        self.sums += sums
        self._learn(listing, known, counting)

    def _learn(self, listing: Listing, known: Iterable[int], counting: Iterable[int]) -> None:
        self.digest, self.gone = listing.digest, dict(listing.gone)
        start = self.number * PER_FOLDER
        for shard in known:
            fact = listing.facts[shard]
            self._bytes[shard - start], self._modified[shard - start] = fact.bytes, fact.modified
        for shard in counting:
            self._counts[shard - start] = True
        self.complete = int(self._counts.sum()) == self._planned
        if self.complete:
            self._bytes, self._modified = np.empty(0, np.int64), np.empty(0)
            self._counts = np.empty(0, bool)
