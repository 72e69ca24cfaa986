"""Commit records: found by listing folder by folder, read once; indices stand for them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from data.commit_records import SHARDS, Record, kept, read_record, record_facts, record_name
from data.indices import PinnedIndex, newest_index
from data.schemas import MOST_RECORD, PER_FOLDER
from data.seen import Listing, Seen
from data.shard_numbers import ShardNumbers
from data.store import Store
from data.sums import Sums
from data.threads import mapped
from data.tombstones import FOLDER as TOMBSTONES
from data.tombstones import discards, discards_of, numbered_folders

READERS = 4  # folders on their way or being parsed at a time

log = logging.getLogger("semix.root")


class Records:
    """The commit records that count, of one plan.

    A record counts if it is in its place, carries this plan's spec digest, and was written after
    the last time its shard was discarded. That is told by numbers, not by a clock: a shard's
    tombstones are numbered, and a record says how many there were.

    What is remembered between looks are numbers and sums, some bytes a shard: a folder of which
    all shards count is not listed again unless one of them is discarded.

    Args:
        shards: how many the plan has.
        compact: take from the newest index what it knows; else every record is read.
        beat: called after each folder of a look, which takes long where no index helps.
    """

    def __init__(
        self,
        store: Store,
        plan_digest: str,
        *,
        shards: int,
        compact: bool = True,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._index: PinnedIndex | None = None
        self._store = store
        self._plan = plan_digest
        self._shards = shards
        self._seen: dict[int, Seen] = {}
        self._compact = compact
        self._beat = beat

    def look(self, start: int = 0, stop: int | None = None) -> None:
        """Bring what is remembered of these shards up to date; all of the plan by default."""
        stop = self._shards if stop is None else min(stop, self._shards)
        buried = numbered_folders(self._store, TOMBSTONES)
        open_: set[int] = set()
        closed: set[int] = set()
        for number in range(start // PER_FOLDER, -(-stop // PER_FOLDER)):
            seen = self._seen.get(number)
            (closed if seen and seen.complete else open_).add(number)
        there = numbered_folders(self._store, SHARDS) if open_ else set()
        for number in open_ - there:
            self._seen.pop(number, None)
        wanted = sorted(closed & buried | open_ & there)
        changed = partial(self._list_changed, buried=buried)
        for listing in mapped(changed, wanted, threads=self._store.parallel):
            if listing is not None:
                self._update(listing)
            self._beat()
        if self._index and self._index.inline:
            self._index = None  # it is large, and what it said is remembered

    def done(self) -> ShardNumbers:
        """Shards of the plan that count, as of the last look."""
        return ShardNumbers.joined(self._seen[number].numbers() for number in sorted(self._seen))

    def missing(self, start: int = 0, stop: int | None = None) -> ShardNumbers:
        """Shards of the plan that do not count, as of the last look."""
        stop = self._shards if stop is None else min(stop, self._shards)
        numbers = range(start // PER_FOLDER, -(-stop // PER_FOLDER))
        found = ShardNumbers.joined(self._lacking(number) for number in numbers)
        return found.between(start, stop)

    def sums(self) -> Sums:
        """Over all shards that count, as of the last look."""
        found = Sums()
        for number in sorted(self._seen):
            found += self._seen[number].sums
        return found

    def seen(self) -> dict[int, tuple[str, int]]:
        """By folder the digest of what was listed there last, and how many shards count."""
        found = ((n, seen.digest, seen.sums.shards) for n, seen in sorted(self._seen.items()))
        return {number: (digest, shards) for number, digest, shards in found if shards}

    @property
    def index(self) -> PinnedIndex | None:
        """The newest that can be read, as of the first time it was asked for."""
        if self._index is None and self._compact:
            self._index = newest_index(self._store, self._plan)
            self._compact = self._index is not None
        return self._index

    def folders(self) -> Iterator[tuple[int, dict[int, Record]]]:
        """What is kept of each record that counts, by shard, ascending: a folder at a time."""
        _ = self.index  # opened once, before threads ask for it
        buried = numbered_folders(self._store, TOMBSTONES)
        numbers = sorted(numbered_folders(self._store, SHARDS))
        read = mapped(partial(self.read_folder, buried=buried), numbers, threads=READERS)
        for number, (entries, _) in zip(numbers, read, strict=True):
            yield number, entries

    def find(self, shard: int) -> Record | None:
        """The whole record of one shard, read now; None if it does not count."""
        name = record_name(shard)
        try:
            record = read_record(self._store.get(name), name, plan_digest=self._plan)
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return None
        return record if record.get("discards", 0) == discards_of(self._store, shard) else None

    def read_folder(
        self,
        number: int,
        *,
        only: Iterable[int] | None = None,
        buried: Iterable[int] | None = None,
    ) -> tuple[dict[int, Record], dict[int, str]]:
        """What is kept of the records of one folder, and why others do not count.

        Args:
            only: of these shards.
            buried: folders in which shards were discarded, where that was listed already.
        """
        buried = numbered_folders(self._store, TOMBSTONES) if buried is None else buried
        listing = self.list_folder(number, buried=buried)
        if only is not None:
            facts = {shard: listing.facts[shard] for shard in only if shard in listing.facts}
            listing = Listing(number, facts, listing.gone)
        return self.entries(listing)

    def entries(self, listing: Listing) -> tuple[dict[int, Record], dict[int, str]]:
        """As `read_folder`, of what was listed before."""
        known = {entry["shard"]: entry for entry in self._indexed(listing.number)}
        fits = {s: known[s] for s in listing.facts if s in known and _fits(known[s], listing)}
        found, refused = self._read(listing, [s for s in listing.facts if s not in fits])
        return dict(sorted((fits | found).items())), refused

    def list_folder(self, number: int, *, buried: Iterable[int]) -> Listing:
        # Tombstones first: what is discarded between the two listings is discarded later.
        gone = discards(self._store, number) if number in buried else {}
        facts = self._store.scan(f"{SHARDS}/{number:04d}", suffix=".json")[0]
        return Listing(number, record_facts(facts), gone)

    def _lacking(self, number: int) -> np.ndarray:
        if number in self._seen:
            return self._seen[number].lacking()
        start = number * PER_FOLDER
        return np.arange(start, min(start + PER_FOLDER, self._shards), dtype=np.int32)

    def _list_changed(self, number: int, *, buried: Iterable[int]) -> Listing | None:
        """None for a complete folder of which nothing was discarded since."""
        seen = self._seen.get(number)
        if seen and seen.complete and seen.gone == discards(self._store, number):
            return None
        return self.list_folder(number, buried=buried)

    def _update(self, listing: Listing) -> None:
        seen = self._seen.get(listing.number)
        news = seen.news(listing) if seen else None
        if seen is None or news is None:
            self._seen[listing.number] = self._first_look(listing)
        elif news:
            entries, refused = self._read(listing, news)
            entries = self._of_plan(entries)
            sums = Sums.over(entries.values())
            seen.add(listing, known=[*entries, *refused], counting=entries, sums=sums)

    def _first_look(self, listing: Listing) -> Seen:
        planned = min(PER_FOLDER, self._shards - listing.number * PER_FOLDER)
        index = self.index
        part = index.parts.get(listing.number) if index else None
        if part and part["records"] == listing.digest:
            facts = listing.facts
            sums = Sums.of_part(part)
            return Seen(listing, known=facts, counting=facts, sums=sums, planned=planned)
        entries, refused = self.entries(listing)
        counting = self._of_plan(entries)
        known, sums = [*entries, *refused], Sums.over(counting.values())
        return Seen(listing, known=known, counting=counting, sums=sums, planned=planned)

    def _of_plan(self, entries: Mapping[int, Record]) -> dict[int, Record]:
        return {shard: entry for shard, entry in entries.items() if shard < self._shards}

    def _read(
        self, listing: Listing, shards: Iterable[int]
    ) -> tuple[dict[int, Record], dict[int, str]]:
        """What is kept of records that count, and why others do not; those gone are in neither."""
        sizes = {shard: listing.facts[shard].bytes for shard in shards}
        small = {record_name(s): s for s, size in sizes.items() if size <= MOST_RECORD}
        found: dict[int, Record] = {}
        refused = {
            s: f"has {size} bytes, far too many" for s, size in sizes.items() if size > MOST_RECORD
        }
        for name, content in self._store.get_many(small).items():
            try:
                entry = kept(read_record(content, name, plan_digest=self._plan), len(content))
            except ValueError as error:
                refused[small[name]] = str(error)
                continue
            if entry["discards"] == listing.gone.get(small[name], 0):
                found[small[name]] = entry
            else:
                refused[small[name]] = "was discarded and is still there"
        return found, refused

    def _indexed(self, number: int) -> list[Record]:
        try:
            index = self.index
            return index.folder(number) if index else []
        except ValueError as error:
            log.warning("%s; the records are read instead", error)
            return []


def _fits(entry: Record, listing: Listing) -> bool:
    """Whether what an index knows of a shard is what is listed now."""
    shard = entry["shard"]
    size, count = listing.facts[shard].bytes, listing.gone.get(shard, 0)
    return (entry["record_bytes"], entry["discards"]) == (size, count)
