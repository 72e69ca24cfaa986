"""Train one seed through its stages, from where it was left, and measure it."""

from contextlib import closing, nullcontext
from pathlib import Path

from accelerate import Accelerator

from calib.base_stage import BaseStage
from calib.checkpoint import Checkpoint, latest_checkpoint, read_metadata
from calib.classifier import load_classifier
from calib.config import TrainConfig
from calib.epochs import CHECKPOINT, Stage, Walk
from calib.evaluate import evaluate_seed
from calib.head_stage import HeadStage
from calib.processes import wait_for_all
from calib.run_folder import HEAD, MODEL, run_digest, seed_folder
from calib.seed_lock import alone_with
from calib.stopping import Stop, ends_at_once
from calib.trackers import Tracking
from calib.training_data import TrainingData


def train_seed(
    config: TrainConfig,
    data: TrainingData,
    run: Path,
    *,
    seed: int,
    accelerator: Accelerator,
    stop: Stop,
) -> None:
    """Train one seed through its stages, from its latest checkpoint if it has one; measure it."""
    folder, digest = seed_folder(run, seed), run_digest(config, data.record)
    label = f"{config.name} seed {seed}"
    settings = config.model_dump(mode="json")
    walk = Walk(
        folder=folder,
        label=label,
        state={"config": config.identity(), "digest": digest},
        every=config.checkpoint_every,
        accelerator=accelerator,
        stop=stop,
        tracking=Tracking(config.trackers, folder, label=label, settings=settings),
    )
    main = accelerator.is_main_process
    with alone_with(folder, label=label, stop=stop) if main else nullcontext():
        wait_for_all(accelerator)  # what others wrote while we waited counts
        train_stages(walk, config, data, seed=seed)
        with ends_at_once(label):
            evaluate_seed(
                config,
                data,
                run,
                seed=seed,
                seconds=walk.seconds,
                device=accelerator.device,
                accelerator=accelerator,
            )
    wait_for_all(accelerator)


def train_stages(walk: Walk, config: TrainConfig, data: TrainingData, *, seed: int) -> None:
    """Train the stages of a seed that are not exported yet."""
    folder, digest, accelerator = walk.folder, walk.state["digest"], walk.accelerator
    with closing(walk.tracking):
        checkpoint = walk.go_on_from(latest_checkpoint(folder / CHECKPOINT))
        if not is_exported(folder / MODEL, digest):
            base = BaseStage(config, data, seed=seed, accelerator=accelerator)
            finish(walk, base, checkpoint, folder / MODEL)
        if config.head is not None and not is_exported(folder / HEAD, digest):
            network = load_classifier(folder.parent, seed).network
            head = HeadStage(config, data, network=network, seed=seed, accelerator=accelerator)
            finish(walk, head, checkpoint, folder / HEAD)


def finish(walk: Walk, stage: Stage, checkpoint: Checkpoint | None, path: Path) -> None:
    """Train a stage to its end and export what it has learnt."""
    own = checkpoint is not None and checkpoint.state["stage"] == stage.name
    walk.run(stage, checkpoint if own else None)
    if walk.accelerator.is_main_process:
        stage.export(path, digest=walk.state["digest"])
    wait_for_all(walk.accelerator)
    walk.accelerator.free_memory()


def is_exported(path: Path, digest: str) -> bool:
    return read_metadata(path).get("digest") == digest
