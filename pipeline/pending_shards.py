"""The missing shards that a worker may still try, and the order in which it tries them."""

import time
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from semix.data.ranges import WHOLE, Partition
from semix.pipeline.shard_job import ShardJob

REFRESH_S = 10.0  # minimum time between two refreshes while other workers make missing shards
REFRESH_INTERVAL_RATIO = 20  # time between refreshes, as a multiple of the time that one takes
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0  # between refreshes while others hold all shards
LONGEST_WAIT_AFTER_SLOW_REFRESH_S = 60.0  # the wait is longer if a refresh takes long
# Between two attempts to claim a shard that another worker holds.
MIN_CLAIM_PAUSE_S, MAX_CLAIM_PAUSE_S = 0.2, 30.0


class LeaseBackoff:
    """Spaces out claims of a leased shard: the longer it is held, the less often we try again."""

    def __init__(self) -> None:
        self._held_since: dict[int, float] = {}  # monotonic
        self._due_at: dict[int, float] = {}

    def add(self, shard: int) -> None:
        """Record that another worker holds the shard now."""
        now = time.monotonic()
        waited_s = now - self._held_since.setdefault(shard, now)
        self._due_at[shard] = now + min(max(waited_s, MIN_CLAIM_PAUSE_S), MAX_CLAIM_PAUSE_S)

    def remove(self, shard: int) -> None:
        self._held_since.pop(shard, None)
        self._due_at.pop(shard, None)

    def due(self, shard: int) -> bool:
        """Whether to claim the shard now: no worker held it, or the pause is over."""
        return self._due_at.get(shard, 0.0) <= time.monotonic()


@dataclass(frozen=True)
class ShardOrder:
    """The order in which worker `slot` of `slots` makes shards, beginning in one part of the plan.

    Attributes:
        only: the shards to make; all by default.
    """

    slot: int
    slots: int
    part: Partition = WHOLE
    only: Container[int] | None = None

    def in_order(self, missing: Sequence[int], total: int) -> Iterator[int]:
        """Yield the missing shards in the order in which this worker tries them.

        First the part's shards of this slot, then the part's other shards, then the other parts,
        beginning with a different one for each part. Shards of other workers come in descending
        order, because those workers make them in ascending order.

        Args:
            missing: ascending.
            total: shards of the whole plan.
        """
        in_part = _missing_in(missing, self.part, total)
        for shard in in_part:
            if shard % self.slots == self.slot:
                yield shard
        for shard in reversed(in_part):
            if shard % self.slots != self.slot:
                yield shard
        for other in self.part.others():
            yield from reversed(_missing_in(missing, other, total))


def _missing_in(missing: Sequence[int], part: Partition, total: int) -> Sequence[int]:
    start, end = (bisect_left(missing, bound) for bound in part.bounds(total))
    return missing[start:end]


@dataclass
class PendingShards:
    """The missing shards that this worker may still try, as of the last refresh.

    Shards with no failed attempt come first: a shard that kills its worker must not block the
    others. Left out are shards in `given_up` and, for the moment, shards that another worker holds.

    Attributes:
        failed_at_start: failed attempts at the first refresh, by shard. Attempts are counted rather
            than dated, because the clocks of several machines disagree.
        given_up: shards not to try again in this run: failed once in this worker, or at least twice
            in any since the first refresh.
        backoff: shards that other workers hold.
    """

    job: ShardJob
    order: ShardOrder
    failed_at_start: dict[int, int] | None = None
    given_up: set[int] = field(default_factory=set)
    backoff: LeaseBackoff = field(default_factory=LeaseBackoff)
    _failed_here: set[int] = field(default_factory=set)  # those of `given_up` that failed here
    _attempts: Mapping[int, int] = field(default_factory=dict)  # failed attempts by shard
    _missing: Sequence[int] = ()
    _refreshed_at: float = 0.0  # monotonic
    _refresh_cost_s: float = 0.0  # of one refresh
    _wait_s: float = SHORTEST_WAIT_S

    def refresh(self) -> bool:
        """Read which shards are missing; return False if none of them may be tried."""
        started = time.monotonic()
        self._missing = self.job.missing()
        self._attempts = self.job.failed_attempts(self._missing)
        if self.failed_at_start is None:
            self.failed_at_start = dict(self._attempts)
        # One failed attempt may be the fault of a broken worker; a healthy one tries again.
        at_start = self.failed_at_start
        new_failures = ((s, count - at_start.get(s, 0)) for s, count in self._attempts.items())
        self.given_up = {shard for shard, count in new_failures if count > 1}
        self.given_up |= {shard for shard in self._failed_here if shard in self._missing}
        self._refreshed_at = time.monotonic()
        self._refresh_cost_s = self._refreshed_at - started
        return next(self._candidates(), None) is not None

    def __iter__(self) -> Iterator[int]:
        return (shard for shard in self._candidates() if self.backoff.due(shard))

    def is_stale(self) -> bool:
        """Whether the list of missing shards is old enough to be read again.

        Asked when a shard in it turns out to be done already.
        """
        interval_s = max(REFRESH_S, REFRESH_INTERVAL_RATIO * self._refresh_cost_s)
        return time.monotonic() - self._refreshed_at > interval_s

    def wait(self) -> None:
        """Sleep, longer each time, while other workers hold all remaining shards.

        If one of them dies, its shards can be claimed.
        """
        interval_s = REFRESH_INTERVAL_RATIO * self._refresh_cost_s
        time.sleep(max(self._wait_s, min(interval_s, LONGEST_WAIT_AFTER_SLOW_REFRESH_S)))
        self._wait_s = min(1.5 * self._wait_s, LONGEST_WAIT_S)

    def reset_wait(self) -> None:
        self._wait_s = SHORTEST_WAIT_S

    def failed_before(self, shard: int) -> bool:
        """Whether an attempt at the shard had failed by the last refresh."""
        return shard in self._attempts

    def give_up(self, shard: int) -> None:
        """Record that this worker failed to make the shard."""
        self._failed_here.add(shard)
        self.given_up.add(shard)

    def _candidates(self) -> Iterator[int]:
        """Yield shards by ascending number of failed attempts, equal ones in the worker's order."""
        for shard in self._in_order():
            if shard not in self._attempts:
                yield shard
        retries = [shard for shard in self._in_order() if shard in self._attempts]
        yield from sorted(retries, key=self._attempts.__getitem__)

    def _in_order(self) -> Iterator[int]:
        only = self.order.only
        for shard in self.order.in_order(self._missing, self.job.num_shards):
            if shard not in self.given_up and (only is None or shard in only):
                yield shard
