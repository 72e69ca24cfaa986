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
from collections.abc import Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from types import FrameType

from semix.data.errors import InputError
from semix.data.files import DISK_FULL
from semix.data.leases import LeaseHeartbeat, claim, release
from semix.data.printable import print_line, print_traceback, printable_line
from semix.data.ranges import WHOLE, Partition, parse_partition, parse_ranges
from semix.pipeline.pending_shards import PendingShards, ShardOrder
from semix.pipeline.plan import Build, open_build
from semix.pipeline.shard_job import (
    BuildJob,
    HeartbeatCallback,
    Publish,
    ShardJob,
    failure_of,
)

# Python itself ends with 1 if a module cannot be imported, and with 2 for wrong arguments.
OK, SOME_FAILED, UNEXPECTED_ERROR, RESTART, CONFIGURATION, STOPPED = 0, 3, 70, 75, 78, 143
# This many failures in a row are blamed on the worker, for example a full disk, not on the shards.
MAX_FAILED_IN_A_ROW = 3
TERMINAL_PREFIX = "semix: "  # prefix of lines that a person should see, not only a log
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
        # Not needed to make images.
    from semix.data.label_sets import LabelSet
    from semix.pipeline.relabel import RelabelJob

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
