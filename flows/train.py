"""Train and evaluate one method, all its seeds, in a run folder."""

import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from calib.config import TrainConfig, check
from calib.run_folder import claim_run, is_measured
from data.errors import InputError
from data.settings import load_settings
from flows.server import prefect_server

log = logging.getLogger("semix.train")


def train(
    config: TrainConfig | str | Path,
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    num_processes: int = 1,
) -> Path:
    """Launch the trainer through accelerate, under a Prefect flow, and see it through.

    A run that is measured under the same settings is left as it is.

    Args:
        config: settings, or a YAML file of them; `overrides` as in `section.key=value`.
        run: the run folder.
        resume: go on from the checkpoints of interrupted seeds.
        num_processes: one a GPU; leave it 1 on a machine without.
    Returns:
        `run`, which now holds evaluation.json.
    Raises:
        InputError: settings or folder cannot be used; nothing was started.
        TrainFailed: the trainer failed.
    """
    source = config.model_dump(mode="json") if isinstance(config, TrainConfig) else config
    settings = load_settings(TrainConfig, source, overrides)
    check(settings)
    check_launch(settings, num_processes)
    run = Path(run).absolute()
    if is_measured(settings, run):
        log.info("%s: measured already, nothing to do", run)
        return run
    resolved = _claim(settings, run)
    with prefect_server(), tempfile.TemporaryDirectory(prefix="semix-") as folder:
        # Prefect costs seconds: not before there is something to run.
        from flows.train_flow import launch_command, launcher_settings, run_train

        launcher = Path(folder) / "accelerate.json"
        launcher.write_text(json.dumps(launcher_settings(settings, num_processes)))
        trainer = ["--config", str(resolved), *["--resume"] * resume]
        command = launch_command(launcher, trainer, num_processes=num_processes)
        run_train(command, name=f"{settings.name} into {run.name}")
    return run


def check_launch(settings: TrainConfig, num_processes: int) -> None:
    """Find, before a process starts, what the processes would refuse one after the other.

    Raises:
        InputError: batches that the processes cannot share, more processes than GPUs, trackers
            that are not installed.
    """
    from calib.micro_batches import check_shares  # these import torch
    from calib.trackers import require_trackers
    from flows.gpus import visible_gpus

    check_shares(settings, num_processes)
    require_trackers(settings.trackers)
    gpus = visible_gpus()
    if gpus and num_processes > len(gpus):
        remedy = f"one a GPU, and {len(gpus)} are visible; choose fewer"
        raise InputError("processes", num_processes, remedy)


def _claim(settings: TrainConfig, run: Path) -> Path:
    try:
        return claim_run(settings, run)
    except OSError as error:
        remedy = f"cannot be written ({error.strerror}); choose another place"
        raise InputError("out", run, remedy) from None
