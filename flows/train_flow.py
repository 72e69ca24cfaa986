"""The Prefect train flow: one task that runs the trainer by `accelerate launch`."""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from prefect import flow, runtime, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from semix.calib.config import TrainConfig
from semix.calib.results import load_methods
from semix.calib.run_folder import EVALUATION
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, link_to, result_table, training_artifact
from semix.flows.calling import from_caller
from semix.flows.child import ChildExit, supervise
from semix.flows.failures import RunFailed
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.gpus import settled_device
from semix.flows.launcher import (
    DIVERGENCE,
    GRACE_S,
    REFUSAL,
    Machines,
    describe_exit,
    exit_reason,
    launch_command,
    most_informative_reason,
    trainer_environment,
    write_launcher,
)
from semix.flows.slots.slot import RECORD
from semix.flows.train import PreparedTraining, claim, prepare_training

FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0

log = logging.getLogger("semix.train")


class TrainFailed(RunFailed):
    """The trainer ended with an error; its checkpoints stay."""


class TrainerLost(TrainFailed):
    """The trainer was killed or crashed; starting it again may help."""


def run_name(parameters: Mapping[str, Any]) -> str:
    """`train csm into run`, `train csm into run, machine 1 of 2`."""
    name = f"train {PurePosixPath(parameters['config']).stem} into {base_name(parameters['out'])}"
    if parameters["machines"] > 1:
        name += f", machine {parameters['machine_rank']} of {parameters['machines']}"
    return name


@flow(**flow_options("train", run_name))
def train_flow(
    config: p.Config,
    out: p.RunFolder,
    overrides: p.TrainOverrides = [],  # noqa: B006 - Prefect copies it
    processes: p.Processes = 1,
    machines: p.Machines = 1,
    machine_rank: p.MachineRank = 0,
    main_process: p.MainProcess = "",
    restarts: p.Restarts = 0,
    device: p.Device = "auto",
) -> dict[str, Any]:
    """Train and measure all seeds of one method in a run folder.

    A cancelled run writes a checkpoint first; start it again, and it goes on.
    """
    launch_machines = Machines(processes, machines, machine_rank, main_process, device)
    with run_context("train"):
        prepared = from_caller(PreparedTraining) or prepare_training(
            config, out, overrides, launch_machines, restarts=restarts
        )
        settings, run = prepared.settings, prepared.run
        key = artifact_key("train", str(run))
        if not prepared.measured:
            run_trainer(settings, run, launch_machines, restarts=restarts, key=key)
        if machine_rank == 0:
            result_table(load_methods([run]), key=key)
            link_to(run / EVALUATION, key=key)
        return {
            "run": str(run),
            "name": settings.name,
            "seeds": list(settings.seeds),
            "evaluation": str(run / EVALUATION),
        }


def run_trainer(
    settings: TrainConfig,
    run: Path,
    machines: Machines,
    *,
    restarts: int,
    key: str,
) -> None:
    """Run the trainer to its end, and again if it was lost.

    Args:
        key: key of the artifact that shows the progress, which the main machine updates.
    """
    machines = replace(machines, device=settled_device(machines.device))
    trainer = ["--config", str(claim(settings, run, machines)), f"--device={machines.device}"]
    is_main = machines.rank == 0
    display = training_artifact(settings, run, key=key) if is_main else nullcontext(_show_nothing)
    with tempfile.TemporaryDirectory(prefix="semix-") as folder, display as show:
        launcher = write_launcher(settings, Path(folder), machines)
        command = launch_command(launcher, trainer, num_processes=machines.local_processes)
        launch_task = launch.with_options(retries=restarts, retry_delay_seconds=pauses(restarts))
        launch_task(command, trainer_environment(machines), restarts, show)
        show()


def _show_nothing() -> None:
    pass


def pauses(restarts: int) -> list[float]:
    """Seconds before each restart; the last value also holds for all later restarts."""
    return [min(FIRST_PAUSE_S * 2**i, MAX_PAUSE_S) for i in range(max(1, min(restarts, 8)))]


def worth_a_restart(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """Prefect's retry condition: whether a task run failed because its trainer was lost."""
    return isinstance(state.result(raise_on_failure=False), TrainerLost)


@task(task_run_name="accelerate launch", retry_condition_fn=worth_a_restart, **RECORD)
def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    restarts: int = 0,
    show: Callable[[], None] = _show_nothing,
) -> None:
    """Run the trainer to its end; Prefect starts it again if it was lost.

    Args:
        environment: changes to this process's environment.
        restarts: maximum number of restarts.
        show: called after every line of the trainer, which writes one per epoch.

    Raises:
        TrainFailed: with the exit status and the trainer's last lines.
        TrainerLost: likewise, for a trainer that was killed or crashed.
    """
    reasons: list[str] = []

    def on_line(line: str) -> None:
        reasons.extend(exit_reason(line))
        if not line.startswith(REFUSAL):  # the exception repeats it
            log.info("%s", line)
        show()

    restart = runtime.task_run.run_count - 1
    if restart:
        log.warning("restart %d of %d, from the last checkpoint", restart, restarts)
    try:
        outcome = supervise(command, on_line=on_line, environment=environment, grace_s=GRACE_S)
    except BaseException:  # an interrupt, which arrives here after the trainer has ended
        log.warning("stopped; the training is in a checkpoint, and the same command goes on")
        raise
    if outcome.returncode != 0:
        raise failure(outcome, reasons)


def failure(outcome: ChildExit, reasons: Sequence[str]) -> TrainFailed:
    """The error to raise for a trainer that ended with an error.

    Args:
        reasons: reasons that trainers gave; accelerate turns every exit status into 1, and with
            several processes adds a long report.
    """
    reason = most_informative_reason(reasons)
    if reason.startswith(REFUSAL):
        return TrainFailed(reason.removeprefix(REFUSAL), exit_status=2)
    if reason.startswith(DIVERGENCE):  # a restart would diverge again
        return TrainFailed(f"{reason}; the last checkpoint stays")
    # If semix itself is stopped, this is not reached, so an interruption counts as a loss, too.
    lines = [f"training ended: {describe_exit(outcome, reasons)}", *outcome.last_lines]
    # No other trainer may run beside one that cannot be ended.
    error_type = TrainFailed if outcome.stuck else TrainerLost
    return error_type("\n".join([*lines, "checkpoints stay; the same command goes on"]))
