"""The Prefect train flow: one task that runs the trainer by `accelerate launch`."""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from prefect import flow, task

from semix.calib.config import TrainConfig
from semix.calib.results import load_methods
from semix.calib.run_folder import EVALUATION
from semix.flows import parameters as p
from semix.flows.artifacts import artifact_key, link_to, result_table, training_artifact
from semix.flows.calling import from_caller
from semix.flows.failures import RunFailed
from semix.flows.flow_runs import base_name, flow_options, run_context
from semix.flows.gpus import settled_device
from semix.flows.launcher import DIVERGENCE, REFUSAL, Machines, TrainerExit, run_trainer
from semix.flows.slots.slot import RECORD
from semix.flows.train import PreparedTraining, claim, prepare_training

log = logging.getLogger("semix.train")


class TrainFailed(RunFailed):
    """The trainer ended with an error; its checkpoints stay."""


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
            launch(settings, run, launch_machines, restarts=restarts, key=key)
        if machine_rank == 0:
            result_table(load_methods([run]), key=key)
            link_to(run / EVALUATION, key=key)
        return {
            "run": str(run),
            "name": settings.name,
            "seeds": list(settings.seeds),
            "evaluation": str(run / EVALUATION),
        }


@task(task_run_name="accelerate launch", **RECORD)
def launch(
    settings: TrainConfig, run: Path, machines: Machines, *, restarts: int, key: str
) -> None:
    """Run the trainer to its end, and again if it was lost.

    Args:
        key: key of the artifact that shows the progress, which the main machine updates.
    Raises:
        TrainFailed: with the exit status and the trainer's last lines.
    """
    machines = replace(machines, device=settled_device(machines.device))
    claim(settings, run, machines)
    is_main = machines.rank == 0
    with training_artifact(settings, run, key=key) if is_main else nullcontext() as show:

        def on_line(line: str) -> None:
            if not line.startswith(REFUSAL):  # the exception repeats it
                log.info("%s", line)
            if show is not None:
                show()

        try:
            ended = run_trainer(settings, run, machines, on_line=on_line, restarts=restarts)
        except BaseException:  # an interrupt, which arrives here after the trainer has ended
            log.warning("stopped; the training is in a checkpoint, and the same command goes on")
            raise
        if ended.outcome.returncode != 0:
            raise failure(ended)
        if show is not None:
            show()


def failure(ended: TrainerExit) -> TrainFailed:
    """The error to raise for a trainer that ended with an error."""
    if ended.reason.startswith(REFUSAL):
        return TrainFailed(str(ended), exit_status=2)
    if ended.reason.startswith(DIVERGENCE):  # a restart would diverge again
        return TrainFailed(f"{ended}; the last checkpoint stays")
    lines = [f"training ended: {ended}", *ended.outcome.last_lines]
    return TrainFailed("\n".join([*lines, "checkpoints stay; the same command goes on"]))
