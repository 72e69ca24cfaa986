"""One slot: a Prefect task that sees one worker process after another through to the end."""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from data.errors import InputError
from data.leases import TIME_TO_LIVE
from data.ranges import format_ranges
from flows.child import python_module
from flows.flow_runs import is_logged
from flows.gpus import settled_device
from flows.slots.log import NEWS, SlotLog, slot_log
from flows.slots.lost_shards import record_lost
from flows.slots.settings import SlotSettings
from flows.supervise import POLL_S, Heartbeat, Outcome, Stop, supervise

WORKER = "pipeline.worker"  # the module of a worker process
RETRIES = 3  # losses in a row without a shard between them, after which a slot is given up
PAUSE_S = 3.0  # before a lost worker is started again
# After each further loss in a row ten times as long: together they outlive a store that is away
# for five minutes.
PAUSES_GROW, LONGEST_PAUSE_S = 10.0, 300.0
SILENCE_S = TIME_TO_LIVE  # of a heartbeat; one forward batch takes seconds to minutes
SOME_FAILED, RESTART = 1, 75  # exit statuses of a worker

# Results are small records that nobody needs afterwards; the store says what is done.
RECORD: dict[str, Any] = {
    "persist_result": False,
    "result_serializer": "json",
    "cache_policy": NO_CACHE,
}

log = logging.getLogger("semix.build")


class WorkerLost(RuntimeError):
    """A slot's workers were killed, hung, or asked for a new process, again and again."""


class WorkerFailed(RuntimeError):
    """A worker ended with an error that a new process would meet again, or was stopped."""


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
) -> dict[str, Any]:
    """Run a worker process to its end, and another one when it is lost; `stop` ends it early.

    A slot may work for weeks: only losses in a row count, those without a shard made between.

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
    with slot_log(_teller(get_run_logger().info)) as lines:
        while True:
            made = lines.made
            outcome = _live(command, lines, environment, stop, shards=shards, silence_s=silence_s)
            if outcome.returncode in (0, SOME_FAILED) and not outcome.hung:
                return {"slot": slot, "status": outcome.returncode, "made": lines.made}
            reason = f"slot {slot}: its worker ended: {outcome}"
            text = "\n".join([reason, *outcome.last_lines[-8:]])
            if stop.is_set() or not _is_lost(outcome):
                raise WorkerFailed(text)
            if url:
                _record_lost(url, outcome, labels)
            losses = 1 if lines.made > made else losses + 1
            if losses > RETRIES:
                raise WorkerLost(text)
            then = f"restart {losses} of {RETRIES}"
            get_run_logger().warning(f"{text}\n{then}")
            log.warning("%s; %s", reason, then, extra={"told_prefect": True})
            _sleep(pause_after(losses, pause_s), stop)
            if stop.is_set():
                raise WorkerFailed(text)


def _teller(told: Callable[[str], None]) -> Callable[[str], None]:
    """For a worker's lines: what is for a person goes to the terminal, too, where the flow runs."""

    def tell(line: str) -> None:
        if line.startswith(NEWS) and is_logged():
            log.info("%s", line.removeprefix(NEWS))
        else:
            told(line)

    return tell


def _record_lost(url: str, outcome: Outcome, labels: str) -> None:
    """That may fail: a slot outlives its store's silence."""
    try:
        shards = record_lost(url, outcome, labels=labels, told=outcome.returncode == RESTART)
    except (OSError, InputError, ValueError) as error:
        log.warning("what worker %d was making is not written down: %s", outcome.pid, error)
        return
    if shards:
        log.info("shards %s count as failed once; others come first", format_ranges(shards))


def pause_after(losses: int, first_s: float = PAUSE_S) -> float:
    """Seconds to wait after so many losses in a row."""
    return min(first_s * PAUSES_GROW ** (losses - 1), LONGEST_PAUSE_S)


def _sleep(seconds: float, stop: Stop) -> None:
    """Until then, or until `stop` is set."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop.is_set():
        time.sleep(POLL_S)


def _live(
    command: list[str],
    lines: SlotLog,
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
