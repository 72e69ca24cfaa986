"""The Prefect train flow: one task that sees `accelerate launch` of the trainer through."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task

from calib.config import TrainConfig
from flows.child import python_module
from flows.errors import RunFailed
from flows.gpus import visible_gpus
from flows.slot import RECORD
from flows.supervise import supervise

GRACE_S = 120.0  # after SIGTERM the trainer ends its epoch and writes a checkpoint
REFUSAL, DIVERGENCE = "error: ", "diverged: "  # how the trainer begins its last word

log = logging.getLogger("semix.train")


class TrainFailed(RunFailed):
    """The trainer ended with an error; its checkpoints stay."""


def run_train(command: list[str], *, name: str) -> None:
    """Run the flow under a name that a person recognises. Raises TrainFailed."""
    train_flow.with_options(flow_run_name=name)(command)


@flow(name="semix train", persist_result=False, result_serializer="json")
def train_flow(command: list[str]) -> None:
    launch(command)


@task(task_run_name="accelerate launch", **RECORD)
def launch(command: list[str]) -> None:
    """Raises TrainFailed with the exit status and the trainer's last lines."""
    run_log = get_run_logger()

    def on_line(line: str) -> None:
        run_log.info(line)
        if not line.startswith(REFUSAL):  # the exception will say it
            log.info("%s", line)

    outcome = supervise(command, on_line=on_line, grace_s=GRACE_S)
    if outcome.returncode == 0:
        return
    # accelerate turns every exit status into 1, and of several processes says so at length.
    words = [line for line in outcome.last_lines if line.startswith((REFUSAL, DIVERGENCE))]
    if words and words[-1].startswith(REFUSAL):
        raise TrainFailed(words[-1].removeprefix(REFUSAL), exit_status=2)
    if words:  # going on would come to the same end
        raise TrainFailed(f"{words[-1]}; the last checkpoint stays")
    text = [f"training ended: {outcome}", *outcome.last_lines]
    raise TrainFailed("\n".join([*text, "checkpoints stay; go on with --resume"]))


def launch_command(launcher: Path, trainer: Sequence[str], *, num_processes: int) -> list[str]:
    """`accelerate launch -m calib.train ...`, by the module behind that command.

    The `accelerate` program imports every subcommand first: 12 s on two cores against 4 s.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (cores or 1) // num_processes))
    return python_module(
        "accelerate.commands.launch",
        f"--config_file={launcher}",
        f"--num_cpu_threads_per_process={threads}",
        "--quiet",  # else its own traceback hides the trainer's
        "--module",
        "calib.train",
        *trainer,
    )


def launcher_settings(config: TrainConfig, num_processes: int) -> dict[str, Any]:
    """All that accelerate would otherwise ask, warn about, or take from a user's own default."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if num_processes > 1 else "NO",
        "use_cpu": not visible_gpus(),
        "num_processes": num_processes,
        "num_machines": 1,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": config.mixed_precision,
        "debug": False,
    }
