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
from semix.data.pace import Throttle
from semix.data.printable import printable
from semix.data.ranges import format_ranges
from semix.data.root import Root
from semix.data.store import Store
from semix.flows.child import (
    ChildExit,
    Heartbeat,
    StopSignal,
    python_module,
    sleep_until_stopped,
    supervise,
)
from semix.flows.flow_runs import is_logged
from semix.flows.gpus import settled_device
from semix.flows.slots import SlotSettings

WORKER = "semix.pipeline.worker"  # the module of a worker process
RETRIES = 3  # losses in a row, with no shard made between them, after which a slot fails
PAUSE_S = 3.0  # before a lost worker is started again
# The pause grows tenfold with each further loss in a row: together the pauses outlast an outage of
# the store of five minutes.
PAUSE_FACTOR, MAX_PAUSE_S = 10.0, 300.0
SILENCE_S = leases.TIME_TO_LIVE  # limit without a heartbeat; a batch takes seconds to minutes
SOME_FAILED, RESTART = 3, 75  # exit statuses of a worker
TERMINAL_PREFIX = "semix: "  # prefix, by `semix.pipeline.worker`, of lines also for the terminal
SHARD_LINE_EVERY_S = 10.0  # a line per shard would be a million lines in Prefect's database
SHARD_LINE = re.compile(r"shard \d+( failed)?: ")
LEASED_SHARD = re.compile(
    r"(?:labels-[0-9a-f]{12}-)?(\d{7})"
)  # as `semix.pipeline.shard_job` names its shards
RENEW_EVERY_S = 15.0
LOOK_EVERY_S = 5.0
# Some network file systems show a file's new time only after a minute.
LEASE_TIMEOUT_S = 90.0

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
    slot_args = [f"--slot={slot}", f"--slots={slots}"]
    range_arg = [f"--range={settings.range}"] if settings.range else []
    label_arg = [f"--labels={labels}"] if labels else []
    return [url, *slot_args, *range_arg, *label_arg, *(f"--set={text}" for text in overrides)]


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

    A slot may work for weeks, so only losses in a row count, with no shard made between them. A
    stopped slot is shown as cancelled, as is the run that stops it.

    Args:
        environment: changes to the environment of this process.
        device: auto, cpu or cuda; auto is resolved on the slot's machine when it begins.
        url, labels: the root and label set in the arguments, to record the shards of a lost
            worker; empty if no shards are recorded.
        shards: only these shards, as in `3,7-9`; empty for all.
        pause_s: pause before the first restart; further ones in a row are longer.
    Raises:
        InputError: the GPUs cannot be listed.
        WorkerLost: more than RETRIES losses in a row.
        WorkerFailed: a worker ended with an error that a new process would meet again.
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
                return _cancelled_state(slot)
            reason = f"slot {slot}: its worker ended: {outcome}"
            last_lines = (line for line in outcome.last_lines[-8:] if outcome.error not in line)
            text = "\n".join([reason, *(last_lines if outcome.exited else outcome.last_lines[-8:])])
            if not _is_lost(outcome):
                raise WorkerFailed(text)
            if url:
                _record_lost(url, outcome, labels)
            losses = 1 if lines.made > before else losses + 1
            if losses > RETRIES:
                raise WorkerLost(text)
            pause = pause_after(losses, pause_s)
            next_step = f"restart {losses} of {RETRIES} in {pause:.0f} s"
            get_run_logger().warning(printable(f"{text}\n{next_step}"))
            log.warning("%s; %s", reason, next_step, extra={"sent_to_prefect": True})
            sleep_until_stopped(pause, stop)
            if stop.is_set():
                return _cancelled_state(slot)


def _cancelled_state(slot: int) -> State[Any]:
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
        if shards:  # the list of a large root may be too long for a command line
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
    """Seconds to wait after this number of losses in a row."""
    return min(first_s * PAUSE_FACTOR ** (losses - 1), MAX_PAUSE_S)


# Worker lines that are sent to Prefect: all, but only some of those about shards


class SlotLog:
    """Forwards a worker's lines, but of lines about shards only one every few seconds.

    Attributes:
        made: number of made shards, according to the lines.
    """

    def __init__(self, send: Callable[[str], None], *, every_s: float = SHARD_LINE_EVERY_S) -> None:
        self.made = 0
        self._send = send
        self._pauses = {kind: Throttle(every_s, at_once=True) for kind in ("made", "failed")}
        self._unsent = {"made": 0, "failed": 0}
        self._last: dict[str, str] = {}

    def __call__(self, line: str) -> None:
        about_shard = SHARD_LINE.match(line)
        if about_shard is None:
            self._send(line)
            return
        kind = "failed" if about_shard[1] else "made"
        self.made += kind == "made"
        self._unsent[kind] += 1
        self._last[kind] = line
        if self._pauses[kind].is_due():
            self._send_latest(kind)

    def close(self) -> None:
        """Send the lines that are not sent yet."""
        for kind, count in self._unsent.items():
            if count:
                self._send_latest(kind)

    def _send_latest(self, kind: str) -> None:
        count = self._unsent[kind] - 1
        self._send(self._last[kind] + (f" ({count} more {kind} before it)" if count else ""))
        self._unsent[kind] = 0
        self._pauses[kind].restart()


def _line_sender(send: Callable[[str], None]) -> Callable[[str], None]:
    """A function that sends lines to `send`, or to the terminal if they are for it."""

    def route(line: str) -> None:
        if line.startswith(TERMINAL_PREFIX) and is_logged():
            log.info("%s", line.removeprefix(TERMINAL_PREFIX))
        else:
            send(line)

    return route


# The shards of a lost worker are recorded as failed, so that other shards come first


def record_lost(
    url: str, outcome: ChildExit, *, labels: str = "", recorded: bool = False
) -> list[int]:
    """Record the unfinished shards of a worker of this machine as failed; release its leases.

    A killed worker records nothing itself, and the next one would begin with the same shard.

    Args:
        labels: the label set for which the worker made labels; empty if it made images.
        recorded: whether the worker recorded its failures itself; then only leases are released.
    Returns:
        The recorded shards.
    """
    root = Root(url)
    records = LabelSet(root, labels) if labels else root
    names = leases.held_by(root.store, outcome.pid)
    matches = [LEASED_SHARD.fullmatch(name) for name in names] if names and not recorded else []
    missing = frozenset(records.missing() if any(matches) else ())
    shards = [shard for match in matches if match and (shard := int(match[1])) in missing]
    for shard in shards:
        records.record_failure(
            Failure(
                shard=shard, attempt=1, error="WorkerLost", message=str(outcome), time=time.time()
            )
        )
    # Read again: another worker may have taken over some leases.
    for name in leases.held_by(root.store, outcome.pid) if names else []:
        root.store.delete(leases.lease_name(name))
    return shards


def _record_lost(url: str, outcome: ChildExit, labels: str) -> None:
    """As `record_lost`, but only warn on errors: a slot goes on while its store does not answer."""
    try:
        shards = record_lost(url, outcome, labels=labels, recorded=outcome.returncode == RESTART)
    except (OSError, InputError, ValueError) as error:
        log.warning("shards of lost worker %d are not recorded: %s", outcome.pid, error)
        return
    if shards:
        log.info("shards %s count as failed once; other shards come first", format_ranges(shards))


# Slots on other machines end when a lease in the store ends, which their flow renews


@contextmanager
def run_lease(url: str) -> Iterator[tuple["FlowEnded", Callable[[], None]]]:
    """Hold and renew a lease during the block; yields the slots' stop signal, and its setter."""
    store, name = Store(url), f"run-{uuid4().hex[:16]}"
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_EVERY_S):
            with suppress(OSError, InputError):  # then the slots do not reach the store either
                leases.renew(store, name)

    def end() -> None:
        ended.set()
        thread.join(RENEW_EVERY_S)
        with suppress(OSError):  # the slots notice that it is not renewed
            leases.release(store, name)

    thread = threading.Thread(target=renew, name="run lease", daemon=True)
    leases.claim(store, name)
    thread.start()
    try:
        yield FlowEnded(store, leases.lease_name(name)), end
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
    _look: Throttle = field(default_factory=lambda: Throttle(LOOK_EVERY_S, at_once=True))

    def __reduce__(self) -> tuple[type["FlowEnded"], tuple[Store, str]]:
        return type(self), (self.store, self.name)  # monotonic times are those of one machine

    def is_set(self) -> bool:
        """Reads the store at most every LOOK_EVERY_S seconds."""
        if not self._ended and self._look.is_due():
            self._ended = self._lease_is_lost()
            self._look.restart()
        return self._ended

    def _lease_is_lost(self) -> bool:
        try:
            info = self.store.infos(leases.FOLDER).get(self.name)
        except (OSError, InputError):  # credentials may be refused for a moment, too
            self._since = time.monotonic()
            return False
        if info is None:
            return True
        if info.modified != self._modified:
            self._modified, self._since = info.modified, time.monotonic()
        return time.monotonic() - self._since > LEASE_TIMEOUT_S
