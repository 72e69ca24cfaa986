"""A worker process: loads the models once and makes the missing shards of one root.

    python -m semix.pipeline.worker URL --slot 0 --slots 2
    python -m semix.pipeline.worker URL --slot 0 --slots 8 --range 1/4
    python -m semix.pipeline.worker URL --labels DIGEST

The first two make images, the third makes labels of existing images. Exit status: 0 nothing is left
to do, 1 some shards failed (see `failed/`), 75 restart needed (the device is in a bad state, the
store does not answer, or several shards in a row fail), 78 the settings are wrong, 143 stopped by a
signal, 70 anything else.
"""

import argparse
import logging
import signal
import sys
import time
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from types import FrameType

from semix.data.errors import InputError
from semix.data.files import DISK_FULL
from semix.data.label_sets import LabelSet
from semix.data.leases import LeaseHeartbeat, claim, release
from semix.data.printable import print_line, print_traceback, printable_line
from semix.data.ranges import WHOLE, Partition, parse_partition, parse_ranges
from semix.pipeline.plan import Build
from semix.pipeline.relabel import RelabelJob
from semix.pipeline.root import open_build
from semix.pipeline.shard_job import (
    BuildJob,
    HeartbeatCallback,
    Publish,
    ShardJob,
    failure_of,
)

OK, SOME_FAILED, UNEXPECTED_ERROR, RESTART, CONFIGURATION, STOPPED = 0, 1, 70, 75, 78, 143
# This many failures in a row are blamed on the worker, for example a full disk, not on the shards.
MAX_FAILED_IN_A_ROW = 3
TERMINAL_PREFIX = "semix: "  # prefix of lines that a person should see, not only a log
REFRESH_S = 10.0  # minimum time between two refreshes while other workers make missing shards
REFRESH_INTERVAL_RATIO = 20  # time between refreshes, as a multiple of the time that one takes
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0  # between refreshes while others hold all shards
LONGEST_WAIT_AFTER_SLOW_REFRESH_S = 60.0  # the wait is longer if a refresh takes long
# Between two attempts to claim a shard that another worker holds.
MIN_CLAIM_PAUSE_S, MAX_CLAIM_PAUSE_S = 0.2, 30.0
# cuBLAS, cuSPARSE and cuDNN raise a plain RuntimeError, not one of torch's own error classes.
DEVICE_WORDS = ("CUDA error", "cuDNN error", "cuDNN Frontend error")


class DeviceError(RuntimeError):
    """The device failed, and only a new process can use it again."""


class TooManyFailures(RuntimeError):
    """Several shards in a row failed; a new process or another worker may succeed."""


class AttemptResult(Enum):
    """The outcome of one attempt to make a claimed shard."""

    ALREADY_DONE = auto()
    MADE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class MadeShard:
    """A shard that was made and is to be published.

    Attributes:
        lease: released at the end of its block.
    """

    shard: int
    publish: Publish
    lease: ExitStack


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


@dataclass
class Worker:
    """The worker of one slot of `slots`.

    Makes missing shards until none is left that it may still try.

    Attributes:
        only: the shards to make; all by default.
        part: which part of the plan to begin with.
        heartbeat: called whenever there was progress.
    """

    job: ShardJob
    slot: int
    slots: int
    device: str
    only: Container[int] | None = None
    part: Partition = WHOLE
    heartbeat: HeartbeatCallback = lambda: None
    _failed_in_a_row: int = 0
    _cause: str = ""  # of the last failure

    @cached_property
    def _lease_heartbeat(self) -> LeaseHeartbeat:
        return LeaseHeartbeat(self.job.store, self.heartbeat)

    def run(self) -> int:
        self.job.store.sweep()
        pending = PendingShards(self.job, ShardOrder(self.slot, self.slots, self.part, self.only))
        may_try = pending.refresh()
        if may_try:
            self.job.load(device=self.device, heartbeat=self._lease_heartbeat)
        while may_try:
            if self.try_all(pending):
                pending.reset_wait()
            else:  # other workers hold all remaining shards; if one dies, its shards can be claimed
                pending.wait()
                self.heartbeat()
            may_try = pending.refresh()
        return SOME_FAILED if pending.given_up else OK

    def try_all(self, pending: PendingShards) -> int:
        """Try the pending shards until the last refresh is stale; return how many were tried.

        While one shard is made, the previous one is published on a thread; at most one shard waits
        for publishing. If making fails, the previous shard is still published.
        """
        num_tried = 0
        publishing: tuple[int, Future[AttemptResult]] | None = None
        with ThreadPoolExecutor(1, "publish") as thread:  # leaving the block waits for the thread
            for shard in self._claim_pending(pending):
                if pending.failed_before(shard):  # may kill the process: publish first
                    self._wait_for_publishing(pending, publishing)
                    publishing = None
                made = self.make(shard)
                if made is AttemptResult.ALREADY_DONE:
                    if pending.is_stale():
                        break
                    continue
                num_tried += 1
                future = None
                if isinstance(made, MadeShard):
                    future = thread.submit(self.publish, made)
                self._wait_for_publishing(pending, publishing)
                publishing = (shard, future) if future else None
                if made is AttemptResult.FAILED:
                    self._record_result(pending, shard, made)
            self._wait_for_publishing(pending, publishing)
        return num_tried

    def _claim_pending(self, pending: PendingShards) -> Iterator[int]:
        for shard in pending:
            if claim(self.job.store, self.job.lease(shard)):
                pending.backoff.remove(shard)
                yield shard
            else:
                pending.backoff.add(shard)

    def make(self, shard: int) -> MadeShard | AttemptResult:
        """Make a claimed shard; its lease is held until it is published, else released."""
        with ExitStack() as stack:
            stack.enter_context(self._releasing(self.job.lease(shard)))
            try:
                if self.job.is_done(shard):  # finished between the refresh and the claim
                    return AttemptResult.ALREADY_DONE
                publish = self.job.make(shard, heartbeat=self._lease_heartbeat)
            except Exception as error:
                return self._failed(shard, error)
            return MadeShard(shard, publish, lease=stack.pop_all())

    def publish(self, made: MadeShard) -> AttemptResult:
        """Publish a shard, on whichever thread, and release its lease."""
        with made.lease:
            try:
                summary = made.publish()
            except Exception as error:
                return self._failed(made.shard, error)
        print_line(f"shard {made.shard}: {summary}")
        return AttemptResult.MADE

    @contextmanager
    def _releasing(self, lease: int | str) -> Iterator[None]:
        """Renew a lease that was just claimed until the block is left, then release it."""
        try:
            with self._lease_heartbeat.holding(lease):
                yield
        finally:
            with suppress(OSError):  # a lease that is not renewed expires
                release(self.job.store, lease)

    def _failed(self, shard: int, error: Exception) -> AttemptResult:
        """Record why an attempt failed; re-raises what is no fault of the shard."""
        if isinstance(error, InputError):
            raise error
        self._cause = cause_of(error, self.job.store.url)
        self._record_failure(shard, error)
        if _is_device_error(error):
            raise DeviceError(str(error)) from error
        return AttemptResult.FAILED

    def _wait_for_publishing(
        self, pending: PendingShards, publishing: tuple[int, Future[AttemptResult]] | None
    ) -> None:
        """Wait until the previous shard is published."""
        if publishing:
            shard, future = publishing
            result = future.result()
            self._lease_heartbeat()
            self._record_result(pending, shard, result)

    def _record_result(self, pending: PendingShards, shard: int, result: AttemptResult) -> None:
        """Record the result; raises TooManyFailures after too many failures in a row.

        Shards that had failed before the first refresh do not count.
        """
        if result is AttemptResult.MADE:
            self._failed_in_a_row = 0
            return
        pending.give_up(shard)
        self._failed_in_a_row += shard not in (pending.failed_at_start or ())
        if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            text = f"{self._failed_in_a_row} shards in a row failed, the last one by {self._cause}"
            raise TooManyFailures(text)

    def _record_failure(self, shard: int, error: Exception) -> None:
        print_line(f"shard {shard} failed: {type(error).__name__}: {error}", file=sys.stderr)
        self.job.record_failure(failure_of(shard, error))


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _stop)
    heartbeat = options.heartbeat.touch if options.heartbeat else lambda: None
    try:
        worker = Worker(
            job_of(open_build(options.url, options.set, heartbeat=heartbeat), options.labels),
            options.slot,
            options.slots,
            device=options.device,
            only=_requested_shards(options),
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
    except TooManyFailures as error:
        print_line(f"error: {error}; asking for a new process", file=sys.stderr)
        return RESTART
    except Exception as error:
        print_traceback()
        if _is_transient(error):
            cause = cause_of(error, options.url)
            text = f"error: the store or a file fails, asking for a new process: {cause}"
            print_line(text, file=sys.stderr)
            return RESTART
        return RESTART if _is_device_error(error) else UNEXPECTED_ERROR


def job_of(build: Build, labels: str | None) -> ShardJob:
    """The job of labelling one label set of the root, or of making the root's own images."""
    if labels is None:
        return BuildJob(build)
    return RelabelJob(LabelSet(build.root, labels), build.plan)


def _requested_shards(options: argparse.Namespace) -> Container[int] | None:
    text = options.shards_file.read_text() if options.shards_file else options.shards
    return parse_ranges(text) if text else None


def cause_of(error: Exception, url: str) -> str:
    """A few words on what failed; for a full disk, where it is.

    Args:
        url: of the root, named where the error names no file.
    """
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        file = str(error.filename or url)
        in_root = file.startswith(url.removesuffix("/"))
        return f"disk full at {url if in_root else Path(file).parent}"
    return f"{type(error).__name__}: {error}"


def _is_transient(error: Exception) -> bool:
    """Whether an error of the store or disk may pass, unlike a missing or forbidden file."""
    permanent = isinstance(error, FileNotFoundError | PermissionError)
    return isinstance(error, OSError) and not permanent


def _is_device_error(error: Exception) -> bool:
    import torch

    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(DEVICE_WORDS)


def _stop(signum: int, frame: FrameType | None) -> None:
    # An exception drops the shard in progress and its lease on the way out; a shard that is made
    # already is published first.
    raise SystemExit(STOPPED)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m semix.pipeline.worker",
        description="Make the missing shards of a mixed dataset.",
    )
    parser.add_argument("url", help="root of the mixed dataset; it holds plan.json")
    parser.add_argument("--labels", help="make labels of this set, not images")
    parser.add_argument("--slot", type=int, default=0, help="number of this worker, from 0")
    parser.add_argument("--slots", type=int, default=1, help="how many workers share the work")
    parser.add_argument("--range", default="", help="begin with this part, for example 1/4")
    parser.add_argument("--shards", help="only these, for example 3,7-9")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="override a setting of the plan in this worker, KEY=VALUE",
    )
    parser.add_argument("--shards-file", type=Path, help="file that holds the list for --shards")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--heartbeat", type=Path, help="file to touch after each step")
    return parser.parse_args(arguments)


class _PrefixFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return TERMINAL_PREFIX + printable_line(record.getMessage())


def _log_to_stdout() -> None:
    """Log to standard output, each line beginning with TERMINAL_PREFIX."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_PrefixFormatter())
    logger = logging.getLogger("semix")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ == "__main__":
    _log_to_stdout()
    sys.exit(main())
