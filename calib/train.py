"""Train and measure the seeds of a run, stage by stage; resumes what was interrupted."""

import argparse
import signal
import sys
import warnings
from collections.abc import Collection, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from semix.calib.check import check_config, check_shares, require_trackers
from semix.calib.checkpoint import Checkpoint, latest_checkpoint, read_metadata
from semix.calib.config import TrainConfig
from semix.calib.divergence import Diverged
from semix.calib.evaluate import evaluate_seed, write_evaluation
from semix.calib.features import check_memory
from semix.calib.loop import CHECKPOINT, Stage, Trainer
from semix.calib.models.complexity import complexity
from semix.calib.network import load_trained
from semix.calib.processes import (
    broadcast_from_main,
    leave_group,
    log_from_main_process,
    wait_for_all,
)
from semix.calib.real_data import open_data
from semix.calib.run_folder import (
    CONFIG,
    EVALUATION,
    HEAD,
    LINEAGE,
    MODEL,
    MixedPin,
    check_stored_settings,
    mixed_pin,
    pin_data,
    read_seed_evaluation,
    run_digest,
    seed_evaluation_path,
    seed_folder,
    seed_lock,
    stale_evaluations,
)
from semix.calib.stage_one import BaseStage
from semix.calib.stage_two import HeadStage
from semix.calib.stopping import (
    Interrupted,
    ShouldStop,
    interrupt_on_sigterm,
    never,
    watch_for_termination,
)
from semix.calib.trackers import Tracking
from semix.calib.training_data import TrainingData, prepare
from semix.data.device import resolve_device
from semix.data.errors import InputError, choices
from semix.data.files import require_own_files, write_json
from semix.data.flags import read_excluded
from semix.data.lineage import read_shards
from semix.data.pinned import PinnedRoot
from semix.data.printable import print_line, print_traceback
from semix.data.root import Root
from semix.data.settings import load_settings

CRASHED, INPUT_ERROR, DIVERGED, TERMINATED = 1, 2, 3, 128 + signal.SIGTERM


def train_run(
    run: Path,
    *,
    device: str = "auto",
    only: Collection[int] = (),
    stop: ShouldStop = never,
) -> None:
    """Train and measure all seeds of `run/config.json` that are not done yet.

    Seeds that were interrupted resume from their checkpoints.

    Args:
        device: auto, cpu or cuda; cuda requires a GPU.
        only: train only these seeds; other processes may train the others at the same time. The
            process that measures the last seed writes the run's `evaluation.json`.
        stop: called after every step; if it returns true, a checkpoint is written and Interrupted
            is raised.
    Raises:
        InputError: the settings or data cannot be trained, the GPU is missing, or the folder
            belongs to another run or has links in it.
        Interrupted: `stop` returned true.
        Diverged: a loss or weight is NaN or infinite; the last checkpoint is kept.
    """
    require_own_files("run", run)
    config = load_settings(TrainConfig, run / CONFIG)
    check_config(config)
    for seed in only:
        if seed not in config.seeds:
            raise InputError("--seeds", seed, choices(str(seed), map(str, config.seeds)))
    require_trackers(config.trackers)
    accelerator = make_accelerator(config, run, device=device)
    check_shares(config, accelerator.num_processes)
    unfinished = broadcast_from_main(lambda: unfinished_seeds(config, run), accelerator)
    pin = broadcast_from_main(lambda: pin_of_mixed(config, run), accelerator)
    data = open_data(config, pin=pin, compare_splits=False)
    images = len(data.real.train)
    check_shares(config, accelerator.num_processes, num_images=images)
    check_memory(config, images=images, num_classes=data.num_classes)
    prepare(data, accelerator, allowed=config.real.allow_overlap)
    if accelerator.is_main_process:
        pin_data(data.record, run)
        write_lineage(data, run)
        if unfinished:
            print_complexity(config, data.num_classes)
    for seed in only or config.seeds:
        if seed in unfinished:
            train_seed(config, data, run, seed=seed, accelerator=accelerator, stop=stop)
        elif accelerator.is_main_process:
            print_line(f"{config.name} seed {seed}: done already")
    remeasure_stale(config, data, run, accelerator=accelerator)
    all_measured = all(seed_evaluation_path(run, seed).is_file() for seed in config.seeds)
    if accelerator.is_main_process and all_measured:
        evaluation = write_evaluation(config, data, run, device=accelerator.device)
        print_line(f"{config.name}: measured in {run / EVALUATION}")
        for warning in evaluation["warnings"]:
            print_line(f"warning: {warning}")
    wait_for_all(accelerator)  # when any process ends, the evaluation exists


def print_complexity(config: TrainConfig, num_classes: int) -> None:
    """Print the network's cost per image; warn if its stem does not suit the size of the images."""
    cost = complexity(config, num_classes)
    print_line(f"{config.name}: {cost}")
    if cost.remedy:
        print_line(f"warning: model.name = {config.model.name}: {cost.remedy}")


def write_lineage(data: TrainingData, run: Path) -> None:
    """Write `lineage.json`, the shards on which the run depends, if it uses mixed images."""
    path = run / LINEAGE
    if data.mixed is None or path.is_file():
        return
    pinned = PinnedRoot(Root(data.mixed.url), index=data.mixed.index_name)
    write_json(path, read_shards(pinned.root, pinned.pinned, url=data.mixed.url))


def pin_of_mixed(config: TrainConfig, run: Path) -> MixedPin:
    """The mixed dataset's index and flags for all processes: this run's, or the newest ones."""
    if config.mixed is None:
        return MixedPin()
    pin = mixed_pin(run)
    if pin.index is not None:
        return pin
    root, exclude = Root(config.mixed.url), config.mixed.exclude
    flags = read_excluded(root).count if exclude and exclude.reads_flags else None
    return MixedPin(root.indices()[-1], flags)


def remeasure_stale(
    config: TrainConfig, data: TrainingData, run: Path, *, accelerator: Accelerator
) -> None:
    """Once all seeds are measured, measure those again that were measured with other settings."""
    for seed in broadcast_from_main(lambda: stale_evaluations(config, run), accelerator):
        with interrupt_on_sigterm(f"{config.name} seed {seed}"):
            evaluate_seed(
                config, data, run, seed=seed, device=accelerator.device, accelerator=accelerator
            )
        wait_for_all(accelerator)


def train_seed(
    config: TrainConfig,
    data: TrainingData,
    run: Path,
    *,
    seed: int,
    accelerator: Accelerator,
    stop: ShouldStop,
) -> None:
    """Train the stages of one seed, from its latest checkpoint if it has one, and measure it."""
    folder, digest = seed_folder(run, seed), run_digest(config, data.record)
    label = f"{config.name} seed {seed}"
    settings = config.model_dump(mode="json")
    trainer = Trainer(
        folder=folder,
        label=label,
        config=config.identity(),
        digest=digest,
        checkpoint_every=config.checkpoint_every,
        accelerator=accelerator,
        stop=stop,
        tracking=Tracking(accelerator, folder, label=label, settings=settings),
    )
    is_main = accelerator.is_main_process
    with seed_lock(folder, label=label, stop=stop) if is_main else nullcontext():
        wait_for_all(accelerator)  # files that another training wrote in the meantime are used
        train_stages(trainer, config, data, seed=seed)
        with interrupt_on_sigterm(label):
            evaluate_seed(
                config,
                data,
                run,
                seed=seed,
                seconds=trainer.seconds,
                device=accelerator.device,
                accelerator=accelerator,
            )
    wait_for_all(accelerator)


def train_stages(trainer: Trainer, config: TrainConfig, data: TrainingData, *, seed: int) -> None:
    """Train the stages of a seed that are not exported yet."""
    folder, digest, accelerator = trainer.folder, trainer.digest, trainer.accelerator
    with closing(trainer.tracking):
        latest = broadcast_from_main(lambda: latest_checkpoint(folder / CHECKPOINT), accelerator)
        checkpoint = trainer.resume_from(latest)
        if not broadcast_from_main(lambda: is_exported(folder / MODEL, digest), accelerator):
            base = BaseStage(config, data, seed=seed, accelerator=accelerator)
            train_stage(trainer, base, checkpoint, folder / MODEL)
        has_head = broadcast_from_main(lambda: is_exported(folder / HEAD, digest), accelerator)
        if config.head is not None and not has_head:
            network = load_trained(folder.parent, seed, config=config).network
            head = HeadStage(config, data, network=network, seed=seed, accelerator=accelerator)
            train_stage(trainer, head, checkpoint, folder / HEAD)


def train_stage(trainer: Trainer, stage: Stage, checkpoint: Checkpoint | None, path: Path) -> None:
    """Train a stage to its end and export the selected weights."""
    is_of_stage = checkpoint is not None and checkpoint.state["stage"] == stage.name
    trainer.run(stage, checkpoint if is_of_stage else None)
    if trainer.accelerator.is_main_process:
        stage.export(path, digest=trainer.digest)
    wait_for_all(trainer.accelerator)
    trainer.accelerator.free_memory()


def is_exported(path: Path, digest: str) -> bool:
    return read_metadata(path).get("digest") == digest


def unfinished_seeds(config: TrainConfig, run: Path) -> set[int]:
    """Seeds that are not measured yet.

    Raises:
        InputError: a seed has begun with other settings.
    """
    unfinished = set()
    for seed in config.seeds:
        evaluation = read_seed_evaluation(run, seed)
        if evaluation is not None:
            check_stored_settings(evaluation["config"], config.identity(), run)
            continue
        unfinished.add(seed)
        checkpoint = latest_checkpoint(seed_folder(run, seed) / CHECKPOINT)
        if checkpoint is not None:
            check_stored_settings(checkpoint.state["config"], config.identity(), run)
    return unfinished


def make_accelerator(config: TrainConfig, run: Path, *, device: str = "auto") -> Accelerator:
    """Raises InputError if the GPU is missing, or the device cannot train in this precision."""
    resolve_device(device)
    # Stage one averages the statistics of batch norms over processes after each epoch. By default,
    # those of the first process would be broadcast before each forward pass and replace the others.
    plain_buffers = DistributedDataParallelKwargs(broadcast_buffers=False)
    # torch has renamed this argument, but accelerate still uses the old name.
    warnings.filterwarnings("ignore", r"`broadcast_buffers` is deprecated", FutureWarning)
    try:
        accelerator = Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=list(config.trackers) or None,
            project_dir=str(run),
            # Without a GPU, processes form a group only with cpu=True; else each would train alone.
            cpu=device == "cpu" or not torch.accelerator.is_available(),
            kwargs_handlers=[plain_buffers],
        )
    except ValueError as error:
        raise InputError("mixed_precision", config.mixed_precision, str(error)) from None
    if device == "cuda" and accelerator.device.type != "cuda":
        kind = accelerator.device.type
        remedy = f"accelerate is configured to use {kind}; see ACCELERATE_USE_CPU"
        raise InputError("device", device, remedy)
    return accelerator


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)
    should_stop = watch_for_termination()
    try:
        run, only = options.config.parent, options.seeds
        train_run(run, device=options.device, only=only, stop=should_stop)
    except InputError as error:
        print_line(f"error: {error}", file=sys.stderr)
        return INPUT_ERROR
    except Diverged as error:
        print_line(f"diverged: {error}", file=sys.stderr)
        return _leave(DIVERGED)
    except Interrupted as error:
        print_line(f"interrupted: {error}; the same command goes on", file=sys.stderr)
        return _leave(TERMINATED)
    except Exception as error:
        print_traceback()
        first_line = next(iter(str(error).splitlines()), "")
        print_line(f"crashed: {type(error).__name__}: {first_line}", file=sys.stderr)
        return CRASHED  # others may wait in a collective, until the launcher ends them
    return _leave(0)


def _leave(status: int) -> int:
    """Leave the process group: called where all processes end, unlike after an InputError."""
    leave_group()
    return status


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="accelerate launch -m semix.calib.train",
        description="Train every seed of a run through its stages, then measure it.",
        epilog="Measured seeds are skipped, interrupted ones resume. SIGTERM "
        f"ends the step, writes a checkpoint and exits {TERMINATED}; settings that cannot be "
        f"trained exit {INPUT_ERROR}; a loss or weight that is NaN or infinite exits {DIVERGED} "
        "and leaves the last checkpoint.",
    )
    options.add_argument(
        "--config",
        type=config_path,
        required=True,
        metavar="RUN/config.json",
        help="resolved settings; everything is written to their folder, the run folder",
    )
    options.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cuda fails without a GPU; auto uses the CPU then",
    )
    options.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[],
        metavar="0,2",
        help="only these seeds of the run; other processes may train the rest at the same time",
    )
    return options


def config_path(text: str) -> Path:
    path = Path(text)
    if path.name != CONFIG:
        raise argparse.ArgumentTypeError(f"{text}: give the {CONFIG} of a run folder")
    return path


if __name__ == "__main__":
    log_from_main_process()
    sys.exit(main())
