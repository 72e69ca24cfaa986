"""What a worker tries next, in an order in which workers seldom meet."""

import time
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from data.part import WHOLE, Part
from pipeline.held import Held
from pipeline.work import Work

LOOK_AGAIN_S = 10.0  # after a look, at the earliest, where others make what we saw missing
LOOKS_SHARE = 20  # looking at a large root or a slow store is at most one part in so many
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0  # between looks, where others hold all that is left


@dataclass(frozen=True)
class Share:
    """What is ours to begin with: of one part of the plan, the shards of one slot of `slots`.

    Attributes:
        only: the shards to make; all by default.
    """

    slot: int
    slots: int
    part: Part = WHOLE
    only: Container[int] | None = None

    def in_order(self, missing: Sequence[int], total: int) -> Iterator[int]:
        """Our share of our part, then the other slots' of it, then the other parts.

        Others' shares and parts are walked backwards, towards those who walk them forwards; the
        helpers of several parts begin in different ones.

        Args:
            missing: ascending.
            total: shards of the whole plan.
        """
        ours = _within(missing, self.part, total)
        for shard in ours:
            if shard % self.slots == self.slot:
                yield shard
        for shard in reversed(ours):
            if shard % self.slots != self.slot:
                yield shard
        for other in self.part.others():
            yield from reversed(_within(missing, other, total))


def _within(missing: Sequence[int], part: Part, total: int) -> Sequence[int]:
    start, end = (bisect_left(missing, bound) for bound in part.bounds(total))
    return missing[start:end]


@dataclass
class Walk:
    """The missing shards as of the last look, without those that failed or are held.

    What never failed comes first: a shard that ends its worker must not keep it from the others.

    Attributes:
        before: attempts that had failed when this walk began, by shard.
        failed: shards that we failed to make since, or several attempts of others.
        held: shards that others were seen to hold.
    """

    work: Work
    share: Share
    before: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    held: Held = field(default_factory=Held)
    _ours: set[int] = field(default_factory=set)  # of `failed` what we tried
    _attempts: dict[int, int] = field(default_factory=dict)  # that failed, by shard
    _missing: Sequence[int] = ()
    _looked: float = 0.0  # monotonic
    _cost_s: float = 0.0  # of a look
    _wait_s: float = SHORTEST_WAIT_S

    def __post_init__(self) -> None:
        # Attempts are counted: clocks of several machines, or one that is set back, would lie.
        self.before = self._failed_attempts()

    def look(self) -> bool:
        """Read what is missing now; False if there is nothing that may be tried."""
        started = time.monotonic()
        self._attempts = self._failed_attempts()
        self._missing = self.work.missing()
        # One attempt may tell of a sick worker; a healthy one tries again.
        since = ((s, count - self.before.get(s, 0)) for s, count in self._attempts.items())
        self.failed = {shard for shard, count in since if count > 1}
        self.failed |= {shard for shard in self._ours if shard in self._missing}
        self._looked = time.monotonic()
        self._cost_s = self._looked - started
        return next(self._wanted(), None) is not None

    def __iter__(self) -> Iterator[int]:
        return (shard for shard in self._wanted() if self.held.due(shard))

    def is_stale(self) -> bool:
        """Whether to look again, once a shard turns out to be done."""
        patience = max(LOOK_AGAIN_S, LOOKS_SHARE * self._cost_s)
        return time.monotonic() - self._looked > patience

    def wait(self) -> None:
        """A while, longer each time: others hold what is left, and one of them may die."""
        time.sleep(max(self._wait_s, min(LOOKS_SHARE * self._cost_s, 60.0)))
        self._wait_s = min(1.5 * self._wait_s, LONGEST_WAIT_S)

    def went_on(self) -> None:
        self._wait_s = SHORTEST_WAIT_S

    def failed_before(self, shard: int) -> bool:
        """Whether an attempt at it had failed at the last look."""
        return shard in self._attempts

    def give_up(self, shard: int) -> None:
        """We failed to make it."""
        self._ours.add(shard)
        self.failed.add(shard)

    def _wanted(self) -> Iterator[int]:
        """The fewer attempts failed the sooner; ours first among equals."""
        for shard in self._in_order():
            if shard not in self._attempts:
                yield shard
        again = [shard for shard in self._in_order() if shard in self._attempts]
        yield from sorted(again, key=self._attempts.__getitem__)

    def _in_order(self) -> Iterator[int]:
        only = self.share.only
        for shard in self.share.in_order(self._missing, self.work.num_shards):
            if shard not in self.failed and (only is None or shard in only):
                yield shard

    def _failed_attempts(self) -> dict[int, int]:
        return {shard: len(tries) for shard, tries in self.work.failures().items()}
