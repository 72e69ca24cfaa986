"""One slot: a Prefect task that supervises one worker process after another.

A slot starts a worker, reads its lines and watches its heartbeat. It succeeds with its worker, and
fails if a new process would meet the same error; else it starts another worker, until too many in a
row were lost. Setting `stop` ends the slot and its worker at once.
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
from semix.flows.child import POLL_S, ChildExit, Heartbeat, StopSignal, python_module, supervise
from semix.flows.flow_runs import is_logged
from semix.flows.gpus import settled_device
from semix.flows.slots import SlotSettings

WORKER = "semix.pipeline.worker"  # the module of a worker process
RETRIES = 3  # losses in a row, without a shard between them, after which a slot gives up
PAUSE_S = 3.0  # before a lost worker is started again
# The pause grows tenfold with each further loss in a row: together the pauses outlast an outage of
# the store of five minutes.
PAUSES_GROW, LONGEST_PAUSE_S = 10.0, 300.0
SILENCE_S = leases.TIME_TO_LIVE  # without a heartbeat; a forward batch takes seconds to minutes
SOME_FAILED, RESTART = 1, 75  # exit statuses of a worker
NEWS = "semix: "  # prefix, by `semix.pipeline.worker`, of lines that are also for the terminal
TELL_EVERY_S = 10.0  # one line per shard would be a million lines in Prefect's database
OF_A_SHARD = re.compile(r"shard \d+( failed)?: ")
CLAIMED = re.compile(
    r"(?:labels-[0-9a-f]{12}-)?(\d{7})"
)  # as `semix.pipeline.shard_job` names its shards
RENEW_EVERY_S = 15.0
LOOK_EVERY_S = 5.0
# Some network file systems show a file's new time only after a minute.
FORGOTTEN_AFTER_S = 90.0

# Results are small and not needed afterwards; the store says what is done.
RECORD: dict[str, Any] = {
    "persist_result": False,
    "result_serializer": "json",
    "cache_policy": NO_CACHE,
}
SlotResult = dict[str, int]
SlotFuture = PrefectFuture[SlotResult]

log = logging.getLogger("semix.build")


@dataclass(frozen=True)
class SlotPool:
    """Slots in which tasks can be started now.

    Attributes:
        submit: starts a task with these parameters in a slot.
        environments: per slot, changes to the environment of the process that supervises a worker.
        stop: the stop signal of all slots.
        end: sets `stop`.
    """

    submit: Callable[[Task[..., Any], dict[str, Any]], SlotFuture]
    environments: Sequence[Mapping[str, str]]
    stop: StopSignal
    end: Callable[[], None]


class WorkerLost(RuntimeError):
    """A slot's workers were killed, hung, or asked for a restart, too often in a row."""


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
    """Arguments of a worker that makes images, or the labels of one set; without its device."""
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
    stop: StopSignal,
    device: str = "auto",
    url: str = "",
    labels: str = "",
    shards: str = "",
    silence_s: float = SILENCE_S,
    pause_s: float = PAUSE_S,
) -> SlotResult | State[Any]:
    """Run a worker process to its end, and another one if it is lost; `stop` ends it early.

    A slot may work for weeks, so only losses in a row count, without a shard made between them. A
    stopped slot is shown as cancelled, as is the run that stops it.

    Args:
        environment: changes to the environment of this process.
        device: auto, cpu or cuda; auto is resolved on the slot's machine when it begins.
        url, labels: the root and label set in the arguments, to record which shards a lost worker
            was making; empty for a worker that makes none.
        shards: only these, as in `3,7-9`; empty for all.
        pause_s: pause before the first restart; further ones in a row are longer.
    Raises:
        InputError: the GPUs cannot be listed.
        WorkerLost: more than RETRIES losses in a row.
        WorkerFailed: at once.
    """
    # Composed on the slot's machine: another machine has its Python elsewhere.
    device_option = f"--device={settled_device(device, {**os.environ, **environment})}"
    command, losses = python_module(WORKER, *arguments, device_option), 0
    with closing(SlotLog(_line_sender(get_run_logger().info))) as lines:
        while True:
            before = lines.made
            outcome = _run(command, lines, environment, stop, shards=shards, silence_s=silence_s)
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
            losses = 1 if lines.made > before else losses + 1
            if losses > RETRIES:
                raise WorkerLost(text)
            pause = pause_after(losses, pause_s)
            then = f"restart {losses} of {RETRIES} in {pause:.0f} s"
            get_run_logger().warning(printable(f"{text}\n{then}"))
            log.warning("%s; %s", reason, then, extra={"sent_to_prefect": True})
            _sleep(pause, stop)
            if stop.is_set():
                return _stopped(slot)


def _stopped(slot: int) -> State[Any]:
    return Cancelled(message=f"slot {slot} was stopped; its committed shards stay")


def _run(
    command: list[str],
    lines: Callable[[str], None],
    environment: Mapping[str, str],
    stop: StopSignal,
    *,
    shards: str,
    silence_s: float,
) -> ChildExit:
    """One worker process, from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="semix-") as folder:
        heartbeat = Heartbeat(Path(folder) / "heartbeat", silence_s)
        arguments = [*command, "--heartbeat", str(heartbeat.path)]
        if shards:  # the list may be too long for a command line, if every second one is missing
            (Path(folder) / "shards").write_text(shards)
            arguments += ["--shards-file", str(Path(folder) / "shards")]
        return supervise(
            arguments, on_line=lines, environment=environment, stop=stop, heartbeat=heartbeat
        )


def _is_lost(outcome: ChildExit) -> bool:
    """Whether a new process may succeed."""
    status = outcome.returncode
    # A process that handles signal n exits with 128 + n.
    lost = outcome.hung or status == RESTART or status < 0 or status > 128
    return lost and not outcome.stuck  # a new process on that device would be stuck, too


def pause_after(losses: int, first_s: float = PAUSE_S) -> float:
    """Seconds to wait after so many losses in a row."""
    return min(first_s * PAUSES_GROW ** (losses - 1), LONGEST_PAUSE_S)


def _sleep(seconds: float, stop: StopSignal) -> None:
    """Sleep, until `stop` is set at most."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop.is_set():
        time.sleep(POLL_S)


# Worker lines that are sent to Prefect: all, except that lines about shards are thinned out


class SlotLog:
    """Passes a worker's lines on; of lines about made or failed shards, one every few seconds.

    Attributes:
        made: number of made shards, according to the lines.
    """

    def __init__(self, send: Callable[[str], None], *, every_s: float = TELL_EVERY_S) -> None:
        self.made = 0
        self._send = send
        self._every_s = every_s
        self._due = {"made": 0.0, "failed": 0.0}  # monotonic
        self._unsent = {"made": 0, "failed": 0}
        self._last: dict[str, str] = {}

    def __call__(self, line: str) -> None:
        about_shard = OF_A_SHARD.match(line)
        if about_shard is None:
            self._send(line)
            return
        kind = "failed" if about_shard[1] else "made"
        self.made += kind == "made"
        self._unsent[kind] += 1
        self._last[kind] = line
        if time.monotonic() >= self._due[kind]:
            self._send_latest(kind)

    def close(self) -> None:
        """Send the lines that are not sent yet."""
        for kind, count in self._unsent.items():
            if count:
                self._send_latest(kind)

    def _send_latest(self, kind: str) -> None:
        more = self._unsent[kind] - 1
        self._send(self._last[kind] + (f" ({more} more {kind} before it)" if more else ""))
        self._unsent[kind] = 0
        self._due[kind] = time.monotonic() + self._every_s


def _line_sender(send: Callable[[str], None]) -> Callable[[str], None]:
    """Passes lines to `send`; those for people go to the terminal, if the flow runs here."""

    def pass_on(line: str) -> None:
        if line.startswith(NEWS) and is_logged():
            log.info("%s", line.removeprefix(NEWS))
        else:
            send(line)

    return pass_on


# The shards of a lost worker are recorded as failed, so that others come first


def record_lost(
    url: str, outcome: ChildExit, *, labels: str = "", recorded: bool = False
) -> list[int]:
    """Record the unfinished shards of a worker of this machine as failed; release its leases.

    A killed worker records nothing itself, and the next one would begin with the same shard.

    Args:
        labels: it made the labels of this set instead of images.
        recorded: it recorded its failures itself; only its leases are left.
    Returns:
        The shards.
    """
    root = Root(url)
    records = LabelSet(root, labels) if labels else root
    held = leases.held_by(root.store, outcome.pid)
    claims = [CLAIMED.fullmatch(work) for work in held] if held and not recorded else []
    missing = frozenset(records.missing() if any(claims) else ())
    shards = [shard for match in claims if match and (shard := int(match[1])) in missing]
    for shard in shards:
        records.record_failure(
            Failure(
                shard=shard, attempt=1, error="WorkerLost", message=str(outcome), time=time.time()
            )
        )
    # Leases that no other worker has taken over.
    for work in leases.held_by(root.store, outcome.pid) if held else []:
        root.store.delete(leases.lease_name(work))
    return shards


def _record_lost(url: str, outcome: ChildExit, labels: str) -> None:
    """As `record_lost`, but only warn on errors: a slot goes on while its store does not answer."""
    try:
        shards = record_lost(url, outcome, labels=labels, recorded=outcome.returncode == RESTART)
    except (OSError, InputError, ValueError) as error:
        log.warning("shards of lost worker %d are not recorded: %s", outcome.pid, error)
        return
    if shards:
        log.info("shards %s count as failed once; others come first", format_ranges(shards))


# Slots on other machines end with a lease in the store, which their flow renews while it lives


@contextmanager
def run_lease(url: str) -> Iterator[tuple["FlowEnded", Callable[[], None]]]:
    """Hold and renew a lease during the block; yields the slots' `stop`, and its setter."""
    store, work = Store(url), f"run-{uuid4().hex[:16]}"
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_EVERY_S):
            with suppress(OSError, InputError):  # then the slots do not reach the store either
                leases.renew(store, work)

    def end() -> None:
        ended.set()
        thread.join(RENEW_EVERY_S)
        with suppress(OSError):  # the slots notice that it is not renewed
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
    """The stop signal of a slot on any machine: set when its flow has ended.

    The lease's time is compared only with its earlier time, so clocks need not agree. If the store
    does not answer, nothing is known, and the slot goes on.
    """

    store: Store
    name: str
    _ended: bool = False
    _modified: float | None = None
    _since: float = field(default_factory=time.monotonic)
    _due: float = 0.0

    def __reduce__(self) -> tuple[type["FlowEnded"], tuple[Store, str]]:
        return type(self), (self.store, self.name)  # monotonic times are those of one machine

    def is_set(self) -> bool:
        """Reads the store at most every LOOK_EVERY_S seconds."""
        if not self._ended and time.monotonic() >= self._due:
            self._ended = self._look()
            self._due = time.monotonic() + LOOK_EVERY_S
        return self._ended

    def _look(self) -> bool:
        try:
            fact = self.store.infos(leases.FOLDER).get(self.name)
        except (OSError, InputError):  # credentials may be refused for a moment, too
            self._since = time.monotonic()
            return False
        if fact is None:
            return True
        if fact.modified != self._modified:
            self._modified, self._since = fact.modified, time.monotonic()
        return time.monotonic() - self._since > FORGOTTEN_AFTER_S
