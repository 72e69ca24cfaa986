"""A worker process: holds the models and walks the missing shards of one root.

    python -m pipeline.worker URL --slot 0 --slots 2
    python -m pipeline.worker URL --slot 0 --slots 8 --range 1/4
    python -m pipeline.worker URL --labels DIGEST

makes images, or labels of images that are there. Exit status: 0 nothing is left to do, 1 some
shards failed (see `failed/`), 75 start me again (the device is in a bad state, the store does not
answer, or shard after shard fails), 78 the settings are wrong, 143 asked to stop, 70 anything else.
"""

import argparse
import logging
import signal
import sys
import traceback
from collections.abc import Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from types import FrameType

from data.errors import InputError
from data.leases import Renewing, claim, release
from data.part import WHOLE, Part, parse_part
from data.ranges import parse_ranges
from data.root import Root
from pipeline.walk import Share, Walk
from pipeline.work import Beat, Building, Making, Work, failure_note, finish

OK, SOME_FAILED, BROKEN, RESTART, CONFIGURATION, STOPPED = 0, 1, 70, 75, 78, 143
# So many shards in a row fail for a worker's own reasons, as a full disk, rather than theirs.
MOST_FAILED_IN_A_ROW = 3
NEWS = "semix: "  # begins a line that is for a person, not only for a log
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


@dataclass
class Worker:
    """One slot of `slots`; makes shards until none it may try is missing.

    Attributes:
        only: the shards to make; all by default.
        part: which part of the plan to begin with.
        beat: called whenever work went on.
    """

    work: Work
    slot: int
    slots: int
    device: str
    only: Container[int] | None = None
    part: Part = WHOLE
    beat: Beat = lambda: None
    _failed_in_a_row: int = 0

    @cached_property
    def _renewing(self) -> Renewing:
        return Renewing(self.work.store, self.beat)

    def run(self) -> int:
        self.work.store.sweep()
        walk = Walk(self.work, Share(self.slot, self.slots, self.part, self.only))
        if walk.look():
            self.work.load(device=self.device, beat=self._renewing)
        while walk.look():
            if self.try_all(walk):
                walk.went_on()
            else:  # living workers hold what is left; take over if one dies
                walk.wait()
                self.beat()
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
                made = yield from self.work.make(shard, beat=self._renewing)
            print(f"shard {shard}: {made}", flush=True)
            return Tried.MADE
        except InputError:
            raise
        except Exception as error:
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
        self._failed_in_a_row += shard not in walk.before
        if self._failed_in_a_row >= MOST_FAILED_IN_A_ROW:
            raise FailsAlways(f"{self._failed_in_a_row} shards in a row failed")

    def _record(self, shard: int, error: Exception) -> None:
        print(f"shard {shard} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self.work.record_failure(shard, failure_note(error))


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
    beat = options.heartbeat.touch if options.heartbeat else lambda: None
    try:
        worker = Worker(
            work_of(Root(options.url, beat=beat), labels=options.labels),
            options.slot,
            options.slots,
            device=options.device,
            only=_chosen(options),
            part=parse_part(options.range),
            beat=beat,
        )
        return worker.run()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIGURATION
    except DeviceError as error:
        print(f"device error, asking for a new process: {error}", file=sys.stderr)
        return RESTART
    except FailsAlways as error:
        print(f"{error}, asking for a new process", file=sys.stderr)
        return RESTART
    except Exception as error:
        traceback.print_exc()
        if _is_passing(error):
            print(f"the store or a file fails, asking for a new process: {error}", file=sys.stderr)
            return RESTART
        return RESTART if _is_device_error(error) else BROKEN


def work_of(root: Root, *, labels: str | None) -> Work:
    """The labels of one set of this root, or the root's own images."""
    if labels is None:
        return Building(root)
    from data.label_sets import LabelSet
    from pipeline.relabel.relabelling import Relabelling

    return Relabelling(LabelSet(root, labels))


def _chosen(options: argparse.Namespace) -> Container[int] | None:
    text = options.shards_file.read_text() if options.shards_file else options.shards
    return parse_ranges(text) if text else None


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
        prog="python -m pipeline.worker", description="Make the missing shards of a mixed dataset."
    )
    parser.add_argument("url", help="root of the mixed dataset; it holds plan.json")
    parser.add_argument("--labels", help="make labels of this set, not images")
    parser.add_argument("--slot", type=int, default=0, help="which share, from 0")
    parser.add_argument("--slots", type=int, default=1, help="how many workers share the work")
    parser.add_argument("--range", default="", help="begin with this part, for example 1/4")
    parser.add_argument("--shards", help="only these, for example 3,7-9")
    parser.add_argument("--shards-file", type=Path, help="a file that says so")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--heartbeat", type=Path, help="file to touch whenever work went on")
    return parser.parse_args(arguments)


def _speak() -> None:
    """What semix logs goes to standard output, each line marked."""
    speaker = logging.StreamHandler(sys.stdout)
    speaker.setFormatter(logging.Formatter(NEWS + "%(message)s"))
    logger = logging.getLogger("semix")
    logger.addHandler(speaker)
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ == "__main__":
    _speak()
    sys.exit(main())
