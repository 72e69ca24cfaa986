"""A worker process: holds the models and walks the missing shards of one root.

    python -m semix.pipeline.worker URL --slot 0 --slots 2
    python -m semix.pipeline.worker URL --slot 0 --slots 8 --range 1/4
    python -m semix.pipeline.worker URL --labels DIGEST

makes images, or labels of images that are there. Exit status: 0 nothing is left to do, 1 some
shards failed (see `failed/`), 75 start me again (the device is in a bad state, the store does not
answer, or shard after shard fails), 78 the settings are wrong, 143 asked to stop, 70 anything else.
"""

import argparse
import logging
import signal
import sys
import time
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from types import FrameType

from semix.data.errors import InputError
from semix.data.files import FULL
from semix.data.label_sets import LabelSet
from semix.data.leases import LeaseHeartbeat, claim, release
from semix.data.printable import print_line, print_traceback, printable_line
from semix.data.ranges import WHOLE, Partition, parse_partition, parse_ranges
from semix.data.root import Root
from semix.pipeline.relabel import Relabelling
from semix.pipeline.root import open_root
from semix.pipeline.work import Building, HeartbeatCallback, Making, Work, failure_of, finish

OK, SOME_FAILED, BROKEN, RESTART, CONFIGURATION, STOPPED = 0, 1, 70, 75, 78, 143
# So many shards in a row fail for a worker's own reasons, as a full disk, rather than theirs.
MOST_FAILED_IN_A_ROW = 3
NEWS = "semix: "  # begins a line that is for a person, not only for a log
LOOK_AGAIN_S = 10.0  # after a look, at the earliest, where others make what we saw missing
LOOKS_SHARE = 20  # looking at a large root or a slow store is at most one part in so many
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0  # between looks, where others hold all that is left
FIRST_S, LONGEST_S = 0.2, 30.0  # between questions whether a shard is still held
# What cuBLAS, cuSPARSE and cuDNN report is no error of torch's own kinds.
DEVICE_WORDS = ("CUDA error", "cuDNN error", "cuDNN Frontend error")


class DeviceError(RuntimeError):
    """The device failed in a way that only a new process heals."""


class FailsAlways(RuntimeError):
    """Shard after shard failed here; another process, or another worker, may fare better."""


class Tried(Enum):
    """What became of a shard that was claimed."""

    FOUND_DONE = auto()
    MADE = auto()
    FAILED = auto()


class Held:
    """Asks the less often the longer a shard is held: many wait for the last ones at once."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # monotonic
        self._due: dict[int, float] = {}

    def add(self, shard: int) -> None:
        """Someone holds it now."""
        now = time.monotonic()
        waited = now - self._since.setdefault(shard, now)
        self._due[shard] = now + min(max(waited, FIRST_S), LONGEST_S)

    def remove(self, shard: int) -> None:
        self._since.pop(shard, None)
        self._due.pop(shard, None)

    def due(self, shard: int) -> bool:
        """Whether to ask for it: nobody held it, or it is time to look again."""
        return self._due.get(shard, 0.0) <= time.monotonic()


@dataclass(frozen=True)
class Share:
    """What is ours to begin with: of one part of the plan, the shards of one slot of `slots`.

    Attributes:
        only: the shards to make; all by default.
    """

    slot: int
    slots: int
    part: Partition = WHOLE
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


def _within(missing: Sequence[int], part: Partition, total: int) -> Sequence[int]:
    start, end = (bisect_left(missing, bound) for bound in part.bounds(total))
    return missing[start:end]


@dataclass
class Walk:
    """The missing shards as of the last look, without those that failed or are held.

    What never failed comes first: a shard that ends its worker must not keep it from the others.

    Attributes:
        before: attempts that had failed at the first look, by shard. They are counted: clocks of
            several machines, or one that is set back, would lie.
        failed: shards that we failed to make since, or several attempts of others.
        held: shards that others were seen to hold.
    """

    work: Work
    share: Share
    before: dict[int, int] | None = None
    failed: set[int] = field(default_factory=set)
    held: Held = field(default_factory=Held)
    _ours: set[int] = field(default_factory=set)  # of `failed` what we tried
    _attempts: Mapping[int, int] = field(default_factory=dict)  # that failed, by shard
    _missing: Sequence[int] = ()
    _looked: float = 0.0  # monotonic
    _cost_s: float = 0.0  # of a look
    _wait_s: float = SHORTEST_WAIT_S

    def look(self) -> bool:
        """Read what is missing now; False if there is nothing that may be tried."""
        started = time.monotonic()
        self._missing = self.work.missing()
        self._attempts = self.work.failed_attempts(self._missing)
        if self.before is None:
            self.before = dict(self._attempts)
        # One attempt may tell of a sick worker; a healthy one tries again.
        before = self.before
        since = ((s, count - before.get(s, 0)) for s, count in self._attempts.items())
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


@dataclass
class Worker:
    """One slot of `slots`; makes shards until none it may try is missing.

    Attributes:
        only: the shards to make; all by default.
        part: which part of the plan to begin with.
        heartbeat: called whenever work went on.
    """

    work: Work
    slot: int
    slots: int
    device: str
    only: Container[int] | None = None
    part: Partition = WHOLE
    heartbeat: HeartbeatCallback = lambda: None
    _failed_in_a_row: int = 0
    _cause: str = ""  # of the last failure

    @cached_property
    def _renewing(self) -> LeaseHeartbeat:
        return LeaseHeartbeat(self.work.store, self.heartbeat)

    def run(self) -> int:
        self.work.store.sweep()
        walk = Walk(self.work, Share(self.slot, self.slots, self.part, self.only))
        if walk.look():
            self.work.load(device=self.device, heartbeat=self._renewing)
        while walk.look():
            if self.try_all(walk):
                walk.went_on()
            else:  # living workers hold what is left; take over if one dies
                walk.wait()
                self.heartbeat()
        return SOME_FAILED if walk.failed else OK

    def try_all(self, walk: Walk) -> int:
        """Try what was missing at the last look, until that is too long ago; how many we tried.

        A shard is published on a thread while the next one is made, and no further ahead. Whatever
        ends this, what is made by then is still published.
        """
        tried = 0
        before: tuple[int, Future[Tried]] | None = None
        with ThreadPoolExecutor(1, "publish") as thread:  # left when that has ended
            for shard in self._claimed(walk):
                if walk.failed_before(shard):  # it may end this process, and must end it alone
                    self._settle(walk, before)
                    before = None
                trial = self.make(shard)
                end = _begin(trial)
                if end is Tried.FOUND_DONE:
                    if walk.is_stale():
                        break
                    continue
                tried += 1
                rest = thread.submit(finish, trial) if end is None else None
                self._settle(walk, before)
                before = (shard, rest) if rest else None
                if end:
                    self._take_note(walk, shard, end)
            self._settle(walk, before)
        return tried

    def _claimed(self, walk: Walk) -> Iterator[int]:
        for shard in walk:
            if claim(self.work.store, self.work.lease(shard)):
                walk.held.remove(shard)
                yield shard
            else:
                walk.held.add(shard)

    def make(self, shard: int) -> Making[Tried]:
        """Try one shard under our lease, and let it go; pauses where its work does."""
        lease = self.work.lease(shard)
        try:
            if self.work.is_done(shard):  # finished between our look and our claim
                return Tried.FOUND_DONE
            with self._renewing.holding(lease):
                made = yield from self.work.make(shard, heartbeat=self._renewing)
            print_line(f"shard {shard}: {made}")
            return Tried.MADE
        except InputError:
            raise
        except Exception as error:
            self._cause = cause_of(error, self.work.store.url)
            self._record(shard, error)
            if _is_device_error(error):
                raise DeviceError(str(error)) from error
            return Tried.FAILED
        finally:
            with suppress(OSError):  # whoever wants it sees that nobody renews it
                release(self.work.store, lease)

    def _settle(self, walk: Walk, before: tuple[int, Future[Tried]] | None) -> None:
        """Wait for the shard that was made before."""
        if before:
            shard, rest = before
            end = rest.result()
            self._renewing()
            self._take_note(walk, shard, end)

    def _take_note(self, walk: Walk, shard: int, end: Tried) -> None:
        """Raises FailsAlways after too many failures in a row, of shards that had none before."""
        if end is Tried.MADE:
            self._failed_in_a_row = 0
            return
        walk.give_up(shard)
        self._failed_in_a_row += shard not in (walk.before or ())
        if self._failed_in_a_row >= MOST_FAILED_IN_A_ROW:
            text = f"{self._failed_in_a_row} shards in a row failed, the last one by {self._cause}"
            raise FailsAlways(text)

    def _record(self, shard: int, error: Exception) -> None:
        print_line(f"shard {shard} failed: {type(error).__name__}: {error}", file=sys.stderr)
        self.work.record_failure(failure_of(shard, error))


def _begin(trial: Making[Tried]) -> Tried | None:
    """Go on to where it pauses; None there, else what became of it."""
    try:
        next(trial)
    except StopIteration as end:
        tried: Tried = end.value
        return tried
    return None


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _stop)
    heartbeat = options.heartbeat.touch if options.heartbeat else lambda: None
    try:
        worker = Worker(
            work_of(
                open_root(options.url, options.set, heartbeat=heartbeat), labels=options.labels
            ),
            options.slot,
            options.slots,
            device=options.device,
            only=_chosen(options),
            part=parse_partition(options.range),
            heartbeat=heartbeat,
        )
        return worker.run()
    except InputError as error:
        print_line(f"error: {error}", file=sys.stderr)
        return CONFIGURATION
    except DeviceError as error:
        text = f"error: the device fails, asking for a new process: {error}"
        print_line(text, file=sys.stderr)
        return RESTART
    except FailsAlways as error:
        print_line(f"error: {error}; asking for a new process", file=sys.stderr)
        return RESTART
    except Exception as error:
        print_traceback()
        if _is_passing(error):
            cause = cause_of(error, options.url)
            text = f"error: the store or a file fails, asking for a new process: {cause}"
            print_line(text, file=sys.stderr)
            return RESTART
        return RESTART if _is_device_error(error) else BROKEN


def work_of(root: Root, *, labels: str | None) -> Work:
    """The labels of one set of this root, or the root's own images."""
    return Building(root) if labels is None else Relabelling(LabelSet(root, labels))


def _chosen(options: argparse.Namespace) -> Container[int] | None:
    text = options.shards_file.read_text() if options.shards_file else options.shards
    return parse_ranges(text) if text else None


def cause_of(error: Exception, url: str) -> str:
    """What failed in a few words; of a full disk, its place.

    Args:
        url: of the root, which is meant where the error names no file.
    """
    if isinstance(error, OSError) and error.errno in FULL:
        file = str(error.filename or url)
        inside = file.startswith(url.removesuffix("/"))
        return f"disk full at {url if inside else Path(file).parent}"
    return f"{type(error).__name__}: {error}"


def _is_passing(error: Exception) -> bool:
    """Whether a store or disk may fare better soon; what is not there or forbidden stays so."""
    lasting = isinstance(error, FileNotFoundError | PermissionError)
    return isinstance(error, OSError) and not lasting


def _is_device_error(error: Exception) -> bool:
    import torch

    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(DEVICE_WORDS)


def _stop(signum: int, frame: FrameType | None) -> None:
    # Leaving by an exception drops the shard that is being made and its lease on the way out; one
    # that is made already is published first.
    raise SystemExit(STOPPED)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m semix.pipeline.worker",
        description="Make the missing shards of a mixed dataset.",
    )
    parser.add_argument("url", help="root of the mixed dataset; it holds plan.json")
    parser.add_argument("--labels", help="make labels of this set, not images")
    parser.add_argument("--slot", type=int, default=0, help="which share, from 0")
    parser.add_argument("--slots", type=int, default=1, help="how many workers share the work")
    parser.add_argument("--range", default="", help="begin with this part, for example 1/4")
    parser.add_argument("--shards", help="only these, for example 3,7-9")
    parser.add_argument("--set", action="append", default=[], help="what is otherwise here")
    parser.add_argument("--shards-file", type=Path, help="a file that says so")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--heartbeat", type=Path, help="file to touch whenever work went on")
    return parser.parse_args(arguments)


class _News(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return NEWS + printable_line(record.getMessage())


def _speak() -> None:
    """What semix logs goes to standard output, each line marked."""
    speaker = logging.StreamHandler(sys.stdout)
    speaker.setFormatter(_News())
    logger = logging.getLogger("semix")
    logger.addHandler(speaker)
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ == "__main__":
    _speak()
    sys.exit(main())
