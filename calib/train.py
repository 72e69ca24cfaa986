"""Train a run: every seed through its stages, then measured. `accelerate launch` starts this."""

import argparse
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list

from calib.checkpoint import latest_checkpoint
from calib.config import TrainConfig, check
from calib.config.checks import check_shares, require_trackers
from calib.divergence import Diverged
from calib.epochs import CHECKPOINT
from calib.evaluate import measure_again, write_evaluation
from calib.parameters import one_of
from calib.processes import leave_group, wait_for_all
from calib.run_folder import (
    CONFIG,
    EVALUATION,
    measured_otherwise,
    pin_data,
    pinned_index,
    refuse_differing,
    seed_evaluation,
    seed_folder,
)
from calib.second_stage.memory import check_memory
from calib.stopping import Interrupted, Stop, ends_at_once, never, watch_for_termination
from calib.train_seed import train_seed
from calib.training_data import TrainingData, open_data
from data.device import resolve_device
from data.errors import InputError
from data.files import read_json
from data.settings import load_settings

CRASHED, INPUT_ERROR, DIVERGED, TERMINATED = 1, 2, 3, 128 + signal.SIGTERM


def train(
    run: Path,
    *,
    device: str = "auto",
    only: Collection[int] = (),
    stop: Stop = never,
) -> None:
    """Train and measure all seeds of `run/config.json` that are not done yet.

    Seeds that were interrupted go on from their checkpoints.

    Args:
        device: auto, cpu or cuda; cuda demands a GPU.
        only: these seeds alone; other processes may train the rest beside, and whoever measures
            the last one writes the run's `evaluation.json`.
        stop: asked after every step; True writes a checkpoint and raises Interrupted.
    Raises:
        InputError: settings or data that cannot be trained, a GPU that is not there, or a folder
            of another run.
        Interrupted: `stop` said so.
        Diverged: a loss or weight became NaN or infinite; the last checkpoint stays.
    """
    config = load_settings(TrainConfig, run / CONFIG)
    check(config)
    for seed in only:
        one_of("--seeds", str(seed), [str(own) for own in config.seeds])
    require_trackers(config.trackers)
    todo = unfinished_seeds(config, run)
    accelerator = make_accelerator(config, device=device)
    check_shares(config, accelerator.num_processes)
    data = open_data(config, pinned=pinned_index(run))
    check_memory(config, images=len(data.real.train), num_classes=data.num_classes)
    if accelerator.is_main_process:
        pin_data(data.record, run)
    for seed in only or config.seeds:
        if seed in todo:
            train_seed(config, data, run, seed=seed, accelerator=accelerator, stop=stop)
        else:
            accelerator.print(f"{config.name} seed {seed}: done already")
    measure_otherwise(config, data, run, accelerator=accelerator)
    measured = all(seed_evaluation(run, seed).is_file() for seed in config.seeds)
    if accelerator.is_main_process and measured:
        write_evaluation(config, data, run)
        print(f"{config.name}: measured in {run / EVALUATION}", flush=True)
    wait_for_all(accelerator)  # who launched any of them finds the evaluation


def measure_otherwise(
    config: TrainConfig, data: TrainingData, run: Path, *, accelerator: Accelerator
) -> None:
    """Measure again the seeds that were measured under other settings, once all are trained."""
    # The main process decides: files come later to other machines.
    seeds = broadcast_object_list([measured_otherwise(config, run)])[0]
    for seed in seeds:
        with ends_at_once(f"{config.name} seed {seed}"):
            measure_again(
                config, data, run, seed=seed, device=accelerator.device, accelerator=accelerator
            )
        wait_for_all(accelerator)


def unfinished_seeds(config: TrainConfig, run: Path) -> set[int]:
    """Seeds that are not measured yet.

    Raises:
        InputError: a seed was begun under other settings.
    """
    todo = set()
    for seed in config.seeds:
        checkpoint = latest_checkpoint(seed_folder(run, seed) / CHECKPOINT)
        done = seed_evaluation(run, seed)
        if done.is_file():
            refuse_differing(read_json(done)["config"], config.identity(), run)
            continue
        todo.add(seed)
        if checkpoint is not None:
            refuse_differing(checkpoint.state["config"], config.identity(), run)
    return todo


def make_accelerator(config: TrainConfig, *, device: str = "auto") -> Accelerator:
    """Raises InputError: a GPU that is not there, or the device cannot train in that precision."""
    resolve_device(device)
    # Stage one averages the batch norms' statistics after each epoch. Sending the first
    # process's before each forward pass, the default, would throw the others' away.
    plain_buffers = DistributedDataParallelKwargs(broadcast_buffers=False)
    try:
        found = Accelerator(
            mixed_precision=config.mixed_precision,
            # Processes without a GPU join only if told; else each trains alone, in one folder.
            cpu=device == "cpu" or not torch.accelerator.is_available(),
            kwargs_handlers=[plain_buffers],
        )
    except ValueError as error:
        raise InputError("mixed_precision", config.mixed_precision, str(error)) from None
    if device == "cuda" and found.device.type != "cuda":
        remedy = f"accelerate was told to use {found.device.type}; look at ACCELERATE_USE_CPU"
        raise InputError("device", device, remedy)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = parser().parse_args(arguments)
    terminated = watch_for_termination()
    try:
        run, only = options.config.parent, options.seeds
        train(run, device=options.device, only=only, stop=terminated)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return INPUT_ERROR
    except Diverged as error:
        print(f"diverged: {error}", file=sys.stderr)
        return _ended(DIVERGED)
    except Interrupted as stopped:
        print(f"interrupted: {stopped}; the same command goes on", file=sys.stderr)
        return _ended(TERMINATED)
    except Exception as error:
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        print(f"crashed: {type(error).__name__}: {first}", file=sys.stderr)
        return CRASHED  # others may be in an exchange with us: whoever launched us ends them
    return _ended(0)


def _ended(status: int) -> int:
    """All processes came to this end; bad input may be met by some of them alone."""
    leave_group()
    return status


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="accelerate launch -m calib.train",
        description="Train every seed of a run through its stages, then measure it.",
        epilog="Seeds that are measured are skipped, interrupted ones go on. SIGTERM "
        f"ends the step, writes a checkpoint and exits {TERMINATED}; settings that cannot be "
        f"trained exit {INPUT_ERROR}; a loss or weight that is NaN or infinite exits {DIVERGED} "
        "and leaves the last checkpoint.",
    )
    found.add_argument(
        "--config",
        type=config_path,
        required=True,
        metavar="RUN/config.json",
        help="resolved settings; their folder is the run folder, where everything is written",
    )
    found.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cuda ends a training that finds no GPU; auto goes on without",
    )
    found.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[],
        metavar="0,2",
        help="only these of the run's seeds; other processes may train the rest beside",
    )
    return found


def config_path(text: str) -> Path:
    path = Path(text)
    if path.name != CONFIG:
        raise argparse.ArgumentTypeError(f"{text}: give the {CONFIG} of a run folder")
    return path


if __name__ == "__main__":
    sys.exit(main())
