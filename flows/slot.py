"""One slot: a Prefect task that sees one worker process through to its end."""

import logging
import tempfile
import threading
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from flows.child import python_module
from flows.supervise import Heartbeat, Outcome, supervise

RETRIES = 3
RETRY_DELAY_S = 3.0
SILENCE_S = 900.0  # of a worker's heartbeat; one forward batch takes seconds to minutes
SOME_FAILED, RESTART = 1, 75  # exit statuses of a worker

# Results are small records that nobody needs afterwards; the store says what is done.
RECORD: dict[str, Any] = {
    "persist_result": False,
    "result_serializer": "json",
    "cache_policy": NO_CACHE,
}

log = logging.getLogger("semix.build")


class WorkerLost(RuntimeError):
    """A worker was killed, hung, or asked for a new process: starting one again may help."""


class WorkerFailed(RuntimeError):
    """A worker ended with an error that a new process would meet again, or was stopped."""


def worth_a_restart(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.result(raise_on_failure=False), WorkerLost)


def worker_command(
    url: str, slot: int, slots: int, *, shards: str = "", labels: str = ""
) -> list[str]:
    """The command of a worker that makes images, or the labels of one set."""
    only = ("--shards", shards) if shards else ()
    what = ("--labels", labels) if labels else ()
    share = (f"--slot={slot}", f"--slots={slots}")
    return python_module("pipeline.worker", url, *share, *only, *what)


@task(
    task_run_name="generate slot {slot}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAY_S,
    retry_condition_fn=worth_a_restart,
    **RECORD,
)
def generate(
    slot: int,
    command: list[str],
    *,
    environment: dict[str, str],
    stop: threading.Event,
    silence_s: float = SILENCE_S,
) -> dict[str, Any]:
    """Run one worker process to its end; `stop` ends it early.

    Raises:
        WorkerLost: retried by Prefect, at most RETRIES times.
        WorkerFailed: not retried.
    """
    run_log = get_run_logger()

    def on_line(line: str) -> None:
        run_log.info(line)
        log.debug("slot %d: %s", slot, line)

    with tempfile.TemporaryDirectory(prefix="semix-") as folder:
        heartbeat = Heartbeat(Path(folder) / "heartbeat", silence_s)
        outcome = supervise(
            [*command, "--heartbeat", str(heartbeat.path)],
            on_line=on_line,
            environment=environment,
            stop=stop,
            heartbeat=heartbeat,
        )
    return _judge(slot, outcome, stopped=stop.is_set(), attempt=runtime.task_run.run_count)


def _judge(slot: int, outcome: Outcome, *, stopped: bool, attempt: int) -> dict[str, Any]:
    """The task's small record, or the exception that decides about a retry."""
    status = outcome.returncode
    if status in (0, SOME_FAILED) and not outcome.hung:
        return {"slot": slot, "status": status}
    reason = f"slot {slot}: its worker ended: {outcome}"
    # 128 + n is how a process that handles signal n says that it ended by it.
    lost = outcome.hung or status == RESTART or status < 0 or status > 128
    if lost and not stopped:
        then = f"restart {attempt} of {RETRIES}" if attempt <= RETRIES else "giving it up"
        log.warning("%s; %s", reason, then)
    kind = WorkerLost if lost and not stopped else WorkerFailed
    raise kind("\n".join([reason, *outcome.last_lines[-8:]]))
