"""One slot: its place, and a Prefect task that sees one worker process after another through.

A slot starts a worker, reads its lines and watches its heartbeat. It ends well with its worker, and
badly where a new process would meet the same error again; else it starts another worker, until
too many in a row were lost. Whoever sets `stop` ends it and its worker at once.
"""

import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.states import Cancelled
from prefect.tasks import Task
from semix.data import leases
from semix.data.errors import InputError
from semix.data.formats import Failure
from semix.data.label_sets import LabelSet
from semix.data.printable import printable
from semix.data.ranges import format_ranges
from semix.data.root import Root
from semix.data.store import Store
from semix.flows.child import POLL_S, Heartbeat, Outcome, Stop, python_module, supervise
from semix.flows.flow_runs import is_logged
from semix.flows.gpus import settled_device
from semix.flows.slots import SlotSettings

WORKER = "semix.pipeline.worker"  # the module of a worker process
RETRIES = 3  # losses in a row without a shard between them, after which a slot is given up
PAUSE_S = 3.0  # before a lost worker is started again
# After each further loss in a row ten times as long: together they outlive a store that is away
# for five minutes.
PAUSES_GROW, LONGEST_PAUSE_S = 10.0, 300.0
SILENCE_S = leases.TIME_TO_LIVE  # of a heartbeat; one forward batch takes seconds to minutes
SOME_FAILED, RESTART = 1, 75  # exit statuses of a worker
# In Prefect's database a line a shard would be a million lines.
NEWS = "semix: "  # begins a line that is for a person, too; `semix.pipeline.worker` writes it
TELL_EVERY_S = 10.0
OF_A_SHARD = re.compile(r"shard \d+( failed)?: ")
CLAIMED = re.compile(
    r"(?:labels-[0-9a-f]{12}-)?(\d{7})"
)  # as `semix.pipeline.shard_job` names its shards
RENEW_EVERY_S = 15.0
LOOK_EVERY_S = 5.0
# Some network file systems show a file's new time after a minute only.
FORGOTTEN_AFTER_S = 90.0

# Results are small records that nobody needs afterwards; the store says what is done.
RECORD: dict[str, Any] = {
    "persist_result": False,
    "result_serializer": "json",
    "cache_policy": NO_CACHE,
}
Ended = dict[str, int]
SlotFuture = PrefectFuture[Ended]

log = logging.getLogger("semix.build")


@dataclass(frozen=True)
class Place:
    """Where slots can be started now.

    Attributes:
        submit: start a task with these parameters in a slot.
        environments: one a slot: changes of its worker's to that of the process that supervises it.
        stop: handed to each slot.
        end: sets `stop`.
    """

    submit: Callable[[Task[..., Any], dict[str, Any]], SlotFuture]
    environments: Sequence[Mapping[str, str]]
    stop: Stop
    end: Callable[[], None]


class WorkerLost(RuntimeError):
    """A slot's workers were killed, hung, or asked for a new process, again and again."""


class WorkerFailed(RuntimeError):
    """A worker ended with an error that a new process would meet again."""


def worker_arguments(
    url: str,
    slot: int,
    slots: int,
    *,
    settings: SlotSettings,
    labels: str = "",
    overrides: Sequence[str] = (),
) -> list[str]:
    """Arguments of a worker that makes images, or the labels of one set; all but its device."""
    share = [f"--slot={slot}", f"--slots={slots}"]
    part = [f"--range={settings.range}"] if settings.range else []
    what = [f"--labels={labels}"] if labels else []
    return [url, *share, *part, *what, *(f"--set={override}" for override in overrides)]


@task(task_run_name="generate slot {slot}", **RECORD)
def generate(
    slot: int,
    arguments: list[str],
    *,
    environment: Mapping[str, str],
    stop: Stop,
    device: str = "auto",
    url: str = "",
    labels: str = "",
    shards: str = "",
    silence_s: float = SILENCE_S,
    pause_s: float = PAUSE_S,
) -> Ended | State[Any]:
    """Run a worker process to its end, and another one when it is lost; `stop` ends it early.

    A slot may work for weeks: only losses in a row count, those without a shard made between. One
    that is stopped is shown as cancelled, as the run is that stops it.

    Args:
        environment: changes to that of the process this runs in.
        device: auto, cpu or cuda; auto is what there is where and when the slot begins.
        url, labels: what the arguments name, to write down which shards a lost worker was making;
            empty for a worker that makes none.
        shards: only these, as in `3,7-9`; empty for all.
        pause_s: before the first restart; further ones in a row wait longer.
    Raises:
        InputError: which GPUs there are cannot be known.
        WorkerLost: more than RETRIES losses in a row.
        WorkerFailed: at once.
    """
    # Composed where it runs: another machine has its Python elsewhere.
    own = f"--device={settled_device(device, {**os.environ, **environment})}"
    command, losses = python_module(WORKER, *arguments, own), 0
    with closing(SlotLog(_teller(get_run_logger().info))) as lines:
        while True:
            made = lines.made
            outcome = _live(command, lines, environment, stop, shards=shards, silence_s=silence_s)
            if outcome.returncode in (0, SOME_FAILED) and not outcome.hung:
                return {"slot": slot, "status": outcome.returncode, "made": lines.made}
            if stop.is_set():
                return _stopped(slot)
            reason = f"slot {slot}: its worker ended: {outcome}"
            more = (line for line in outcome.last_lines[-8:] if outcome.error not in line)
            text = "\n".join([reason, *(more if outcome.exited else outcome.last_lines[-8:])])
            if not _is_lost(outcome):
                raise WorkerFailed(text)
            if url:
                _record_lost(url, outcome, labels)
            losses = 1 if lines.made > made else losses + 1
            if losses > RETRIES:
                raise WorkerLost(text)
            pause = pause_after(losses, pause_s)
            then = f"restart {losses} of {RETRIES} in {pause:.0f} s"
            get_run_logger().warning(printable(f"{text}\n{then}"))
            log.warning("%s; %s", reason, then, extra={"told_prefect": True})
            _sleep(pause, stop)
            if stop.is_set():
                return _stopped(slot)


def _stopped(slot: int) -> State[Any]:
    return Cancelled(message=f"slot {slot} was stopped; what it committed stays")


def _live(
    command: list[str],
    lines: Callable[[str], None],
    environment: Mapping[str, str],
    stop: Stop,
    *,
    shards: str,
    silence_s: float,
) -> Outcome:
    """One worker process, from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="semix-") as folder:
        heartbeat = Heartbeat(Path(folder) / "heartbeat", silence_s)
        arguments = [*command, "--heartbeat", str(heartbeat.path)]
        if shards:  # too many for a command line, where every second one is missing
            (Path(folder) / "shards").write_text(shards)
            arguments += ["--shards-file", str(Path(folder) / "shards")]
        return supervise(
            arguments, on_line=lines, environment=environment, stop=stop, heartbeat=heartbeat
        )


def _is_lost(outcome: Outcome) -> bool:
    """Whether a new process may fare better."""
    status = outcome.returncode
    # 128 + n is how a process that handles signal n says that it ended by it.
    lost = outcome.hung or status == RESTART or status < 0 or status > 128
    return lost and not outcome.stuck  # which a new process on its device would be as well


def pause_after(losses: int, first_s: float = PAUSE_S) -> float:
    """Seconds to wait after so many losses in a row."""
    return min(first_s * PAUSES_GROW ** (losses - 1), LONGEST_PAUSE_S)


def _sleep(seconds: float, stop: Stop) -> None:
    """Until then, or until `stop` is set."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop.is_set():
        time.sleep(POLL_S)


# What Prefect is told of a worker's lines: all news, and shards now and then


class SlotLog:
    """Passes a worker's lines on; of lines about shards, made or failed, one each now and then.

    Attributes:
        made: shards that its lines said were made.
    """

    def __init__(self, send: Callable[[str], None], *, every_s: float = TELL_EVERY_S) -> None:
        self.made = 0
        self._send = send
        self._every_s = every_s
        self._due = {"made": 0.0, "failed": 0.0}  # monotonic
        self._held = {"made": 0, "failed": 0}
        self._last: dict[str, str] = {}

    def __call__(self, line: str) -> None:
        found = OF_A_SHARD.match(line)
        if found is None:
            self._send(line)
            return
        kind = "failed" if found[1] else "made"
        self.made += kind == "made"
        self._held[kind] += 1
        self._last[kind] = line
        if time.monotonic() >= self._due[kind]:
            self._tell(kind)

    def close(self) -> None:
        """Send what is held back."""
        for kind, count in self._held.items():
            if count:
                self._tell(kind)

    def _tell(self, kind: str) -> None:
        more = self._held[kind] - 1
        self._send(self._last[kind] + (f" ({more} more {kind} before it)" if more else ""))
        self._held[kind] = 0
        self._due[kind] = time.monotonic() + self._every_s


def _teller(told: Callable[[str], None]) -> Callable[[str], None]:
    """For a worker's lines: what is for a person goes to the terminal, too, where the flow runs."""

    def tell(line: str) -> None:
        if line.startswith(NEWS) and is_logged():
            log.info("%s", line.removeprefix(NEWS))
        else:
            told(line)

    return tell


# What a lost worker was making: written down as failed, so that others come first


def record_lost(url: str, outcome: Outcome, *, labels: str = "", told: bool = False) -> list[int]:
    """Write down what a worker of this machine left unmade when it ended, and free its leases.

    A worker that is killed writes nothing itself, and the next one would begin with the same shard.

    Args:
        labels: it made the labels of this set, not images.
        told: it wrote down itself what failed; its leases alone are left.
    Returns:
        The shards.
    """
    root = Root(url)
    place = LabelSet(root, labels) if labels else root
    held = leases.held_by(root.store, outcome.pid)
    found = [CLAIMED.fullmatch(work) for work in held] if held and not told else []
    missing = frozenset(place.missing() if any(found) else ())
    shards = [shard for match in found if match and (shard := int(match[1])) in missing]
    for shard in shards:
        place.record_failure(
            Failure(
                shard=shard, attempt=1, error="WorkerLost", message=str(outcome), time=time.time()
            )
        )
    # What nobody has taken over.
    for work in leases.held_by(root.store, outcome.pid) if held else []:
        root.store.delete(leases.lease_name(work))
    return shards


def _record_lost(url: str, outcome: Outcome, labels: str) -> None:
    """That may fail: a slot outlives its store's silence."""
    try:
        shards = record_lost(url, outcome, labels=labels, told=outcome.returncode == RESTART)
    except (OSError, InputError, ValueError) as error:
        log.warning("what worker %d was making is not written down: %s", outcome.pid, error)
        return
    if shards:
        log.info("shards %s count as failed once; others come first", format_ranges(shards))


# What ends slots elsewhere: a note in the store, which their flow renews while it lives


@contextmanager
def run_lease(url: str) -> Iterator[tuple["FlowEnded", Callable[[], None]]]:
    """The note is there and renewed during the block; yields the slots' `stop`, and its setter."""
    store, work = Store(url), f"run-{uuid4().hex[:16]}"
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_EVERY_S):
            with suppress(OSError, InputError):  # the slots' store is silent as well
                leases.renew(store, work)

    def end() -> None:
        ended.set()
        thread.join(RENEW_EVERY_S)
        with suppress(OSError):  # they notice that nobody renews it
            leases.release(store, work)

    thread = threading.Thread(target=renew, name="run lease", daemon=True)
    leases.claim(store, work)
    thread.start()
    try:
        yield FlowEnded(store, leases.lease_name(work)), end
    finally:
        end()


@dataclass
class FlowEnded:
    """Whether a flow has ended, asked by a slot on any machine.

    The note's time is only compared with itself: clocks need not agree. Where the store does not
    answer nothing is known, and the slot goes on.
    """

    store: Store
    name: str
    _ended: bool = False
    _modified: float | None = None
    _since: float = field(default_factory=time.monotonic)
    _due: float = 0.0

    def __reduce__(self) -> tuple[type["FlowEnded"], tuple[Store, str]]:
        return type(self), (self.store, self.name)  # the other machine's clock begins anew

    def is_set(self) -> bool:
        """Looks at the store at most every LOOK_EVERY_S seconds."""
        if not self._ended and time.monotonic() >= self._due:
            self._ended = self._look()
            self._due = time.monotonic() + LOOK_EVERY_S
        return self._ended

    def _look(self) -> bool:
        try:
            fact = self.store.infos(leases.FOLDER).get(self.name)
        except (OSError, InputError):  # credentials, too, may be refused for a moment
            self._since = time.monotonic()
            return False
        if fact is None:
            return True
        if fact.modified != self._modified:
            self._modified, self._since = fact.modified, time.monotonic()
        return time.monotonic() - self._since > FORGOTTEN_AFTER_S
