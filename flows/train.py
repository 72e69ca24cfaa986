"""Train and evaluate all seeds of one method in a run folder."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semix.calib.check import check_launch, check_modules, check_settings
from semix.calib.config import TrainConfig
from semix.calib.run_folder import CONFIG, check_same_config, claim_run, is_measured, is_run
from semix.data.errors import InputError
from semix.data.files import read_json
from semix.data.imagefolder import check_outside_images
from semix.data.settings import whole_path
from semix.flows.calling import run_flow
from semix.flows.configs import load_config
from semix.flows.launcher import Machines, check_machines, check_restarts
from semix.flows.paths import check_writable, training_folder

CLAIM_TIMEOUT_S = 900.0  # equals the time that training processes wait for one another
LOOK_S = 1.0

log = logging.getLogger("semix.train")


def train(
    config: TrainConfig | str | Path,
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    machines: Machines = Machines(),  # noqa: B008 - a value that nobody changes
    restarts: int = 0,
) -> Path:
    """Run the trainer through accelerate, under a Prefect flow, to its end.

    A run that is measured under the same settings is not changed; an interrupted run goes on from
    its checkpoints.

    Args:
        config: settings, or path or URL of a YAML file of them; `overrides` as in
            `section.key=value`.
        run: the run folder; machines that train together share it.
        machines: number and machines of the processes; by default one process here.
        restarts: how often a trainer that was killed or crashed is started again.
    Returns:
        `run`, which now holds evaluation.json.
    Raises:
        InputError: settings or folder cannot be used; nothing was started.
        TrainFailed: the trainer failed.
    """
    config_source = config.model_dump(mode="json") if isinstance(config, TrainConfig) else config
    prepared = prepare_training(config_source, run, overrides, machines, restarts=restarts)
    folder = prepared.run
    if prepared.measured:
        log.info("%s: measured already, nothing to do", folder)
        return folder
    config_file = claim(prepared.settings, folder, machines)
    if isinstance(config, TrainConfig):  # the flow gets a file, which people can use again
        config, overrides = config_file, ()
    run_flow(
        "semix.flows.train_flow.train_flow",
        prepared=prepared,
        config=whole_path(config),
        out=str(folder),
        overrides=list(overrides),
        processes=machines.processes,
        machines=machines.count,
        machine_rank=machines.rank,
        main_process=machines.main_process,
        restarts=restarts,
        device=machines.device,
    )
    return folder


@dataclass(frozen=True)
class PreparedTraining:
    """A training run that passed all checks.

    Attributes:
        measured: whether all seeds are measured already.
    """

    settings: TrainConfig
    run: Path
    measured: bool


def prepare_training(
    config: str | Path | Mapping[str, Any],
    run: str | Path,
    overrides: Sequence[str],
    machines: Machines,
    *,
    restarts: int = 0,
) -> PreparedTraining:
    """Check everything that can be checked before a trainer starts.

    Raises:
        InputError: names the setting or argument that cannot be used.
    """
    settings = load_config(TrainConfig, config, overrides)
    folder = checked_run_folder(settings, run, machines, restarts=restarts)
    if is_measured(settings, folder):
        return PreparedTraining(settings, folder, measured=True)
    check_writable("out", folder)
    check_modules(settings)
    return PreparedTraining(settings, folder, measured=False)


def checked_run_folder(
    settings: TrainConfig, run: str | Path, machines: Machines, *, restarts: int = 0
) -> Path:
    """The run folder, after all checks that need no torch.

    Raises:
        InputError: names the setting or argument that cannot be used.
    """
    folder = training_folder(run)
    check_restarts(restarts)
    check_machines(machines)
    check_settings(settings)
    check_launch(settings, machines.processes)
    if not is_run(folder):
        check_outside_images(settings.real.folder, folder)
    check_same_config(settings, folder)
    return folder


def claim(settings: TrainConfig, run: Path, machines: Machines) -> Path:
    """Path of the run's config.json, which holds these settings and which machine 0 writes.

    Raises:
        InputError: the folder belongs to another run, cannot be written, or is not shared.
    """
    if machines.rank > 0:
        return _wait_for_claim(settings, run)
    try:
        return claim_run(settings, run)
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}); choose another place"
        raise InputError("out", run, remedy) from None


def _wait_for_claim(settings: TrainConfig, run: Path) -> Path:
    """Path of config.json, once machine 0 has written the same settings to it."""
    path, deadline = run / CONFIG, time.monotonic() + CLAIM_TIMEOUT_S
    expected = settings.model_dump(mode="json")
    log.info("waiting for machine 0 to begin in %s", run)
    while not (path.is_file() and read_json(path) == expected):
        if time.monotonic() > deadline:
            remedy = "machine 0 has not begun a run there with these settings; start it with the"
            raise InputError("out", run, f"{remedy} same ones, in a folder that all machines share")
        time.sleep(LOOK_S)
    return path
