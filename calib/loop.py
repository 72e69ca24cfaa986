"""The training loop: epochs of a stage, the training step, its metrics, checks for divergence."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from semix.calib.batches import MicroBatch, TrainingBatch, split_batch
from semix.calib.checkpoint import Checkpoint, MidEpochState, State, StateDict, save_checkpoint
from semix.calib.config import OptimiserConfig, TrainConfig
from semix.calib.epoch_lines import EpochLines
from semix.calib.losses import MixedLoss, build_mixed_loss
from semix.calib.losses.base import RealLoss
from semix.calib.methods import Method
from semix.calib.network import Network, mixed_pass
from semix.calib.processes import StopVote, average_gradients, wait_for_all
from semix.calib.run_folder import HISTORY
from semix.calib.stopping import Interrupted, ShouldStop, Stopped
from semix.calib.trackers import Tracking
from semix.data.errors import InputError
from semix.data.files import MAX_JSON, add_path_to_disk_errors, read_bytes, write_atomically
from semix.data.machine import keep_compiled_to_ourselves

CHECKPOINT = "checkpoint"

EpochMetrics = dict[str, float | None]


class TrainingStage(Protocol):
    """A stage of training, whose state can be saved after any step."""

    name: str
    epochs: int
    images_per_epoch: int  # real images, over all processes
    steps: int  # per epoch
    mid_epoch: MidEpochState | None  # set if an epoch was stopped; part of the state

    @property
    def finished(self) -> bool:
        """Whether the stage ends early, before its last epoch; the same in all processes."""

    def train_epoch(
        self, epoch: int, stop: ShouldStop, progress_lines: EpochLines
    ) -> EpochMetrics: ...

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]: ...

    def objects(self) -> StateDict: ...

    def load(self, checkpoint: Checkpoint) -> None: ...

    def export(self, path: Path, *, digest: str) -> None: ...


@dataclass
class Trainer:
    """Trains the stages of one seed, with checkpoints, history and progress lines.

    Attributes:
        folder: the seed's folder.
        label: the beginning of each progress line.
        config, digest: identity of the run, and digest of settings and data; written into every
            checkpoint.
        checkpoint_every: epochs between checkpoints.
        stop: whether to stop; called after every step, in every process.
        tracking: gets the metrics of every epoch, in the main process.
        position: number of epochs done over all stages.
        seconds: spent on those epochs, including before an interruption.
        partial_epoch_s: seconds spent on the next epoch before it was interrupted.
    """

    folder: Path
    label: str
    config: dict[str, object]
    digest: str
    checkpoint_every: int
    accelerator: Accelerator
    stop: ShouldStop
    tracking: Tracking
    position: int = 0
    seconds: float = 0.0
    partial_epoch_s: float = 0.0
    stop_vote: StopVote = field(init=False)

    def __post_init__(self) -> None:
        self.stop_vote = StopVote(self.stop, self.accelerator)

    def resume_from(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Restore position and seconds from a checkpoint, and return it.

        Epochs after the checkpoint are removed from the history; they are trained again.
        """
        if checkpoint is not None:
            self.position = checkpoint.state["position"]
            self.seconds = checkpoint.state["seconds"]
            self.partial_epoch_s = checkpoint.state["begun_s"]
        if self.accelerator.is_main_process:
            path = self.folder / HISTORY
            lines = read_bytes(path, max_bytes=MAX_JSON).splitlines(True) if path.is_file() else []
            write_atomically(path, b"".join(lines[: self.position]))
            self.tracking.start([json.loads(line) for line in lines[: self.position]])
        return checkpoint

    def run(self, stage: TrainingStage, checkpoint: Checkpoint | None) -> None:
        """Train a stage to its end.

        Args:
            checkpoint: of this stage, to resume from; None trains it from its start.
        Raises:
            Interrupted: `stop` returned true in one of the processes.
            Diverged: a loss or weight is NaN or infinite; the epoch is not saved.
        """
        first = 0
        if checkpoint is not None:
            stage.load(checkpoint)
            first = checkpoint.state["epoch"]
        label = f"{self.label} {stage.name}"
        progress_lines = EpochLines(
            label,
            epochs=stage.epochs,
            images=stage.images_per_epoch,
            steps=stage.steps,
            first=first,
            printing=self.accelerator.is_main_process,
        )
        for epoch in range(first, stage.epochs):
            if stage.finished:
                break
            metrics = self._train(stage, epoch, progress_lines)
            last = epoch + 1 == stage.epochs or stage.finished
            stopping = self.stop_vote.vote()
            if stopping or last or (epoch + 1) % self.checkpoint_every == 0:
                self._save(stage, epoch + 1)
            # After the checkpoint, because printing fails if standard output is closed.
            progress_lines.show_epoch(epoch + 1, metrics, last=last)
            if stopping:
                raise Interrupted(f"{label}: stopped after epoch {epoch + 1}")

    def _train(self, stage: TrainingStage, epoch: int, progress_lines: EpochLines) -> EpochMetrics:
        """Train an epoch and write its metrics to the history."""
        started = time.perf_counter()
        try:
            metrics = stage.train_epoch(epoch, self.stop_vote, progress_lines)
        except Diverged as error:
            raise Diverged(f"{self.label} {stage.name} epoch {epoch + 1}: {error}") from None
        except Stopped:
            self.partial_epoch_s += time.perf_counter() - started
            self._save(stage, epoch)
            step = stage.mid_epoch.step if stage.mid_epoch else 0
            position = f"stopped in epoch {epoch + 1} after step {step}"
            raise Interrupted(f"{self.label} {stage.name}: {position}") from None
        seconds = self.partial_epoch_s + time.perf_counter() - started
        self.position += 1
        self.seconds += seconds
        self.partial_epoch_s = 0.0
        if self.accelerator.is_main_process:
            line = {"stage": stage.name, "epoch": epoch, "seconds": seconds, **metrics}
            path = self.folder / HISTORY
            with add_path_to_disk_errors(path), path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.tracking.note(self.position, line)
        return metrics

    def _save(self, stage: TrainingStage, epoch: int) -> None:
        """Write a checkpoint; all processes wait until it is written.

        Args:
            epoch: number of epochs done in the stage.
        """
        if self.accelerator.is_main_process:
            step = stage.mid_epoch.step if stage.mid_epoch else 0
            state: State = {
                "config": self.config,
                "digest": self.digest,
                "stage": stage.name,
                "epoch": epoch,
                "step": step,
                "position": self.position,
                "seconds": self.seconds,
                "begun_s": self.partial_epoch_s,
            }
            save_checkpoint(
                self.folder / CHECKPOINT,
                self.position,
                step=step,
                tensors=stage.tensors(),
                objects=stage.objects(),
                state=state,
            )
        wait_for_all(self.accelerator)


@dataclass(frozen=True)
class TrainingStep:
    """Makes one update per batch, of L = L_real(real images) + weight * L_mixed(mixed images).

    Real and mixed images have separate forward passes, the mixed ones second, as in CSM's code. The
    real loss and its state never get a mixed image. The optimiser also trains the parameters of
    loss and method, whose gradients are not clipped.

    Attributes:
        forward: the network, prepared by accelerate.
    """

    config: TrainConfig
    network: Network
    forward: nn.Module
    method: Method
    loss: RealLoss
    mixed_loss: MixedLoss
    optimiser: AcceleratedOptimizer
    accelerator: Accelerator

    def __call__(self, batch: TrainingBatch) -> Tensor:
        """Make one update; returns this process's STEP_METRICS, float32 [7]."""
        *others, last = split_batch(batch, self.config.accumulate)
        metrics = []
        for micro_batch in others:
            with self.accelerator.no_sync(self.forward):
                metrics.append(self._backward(micro_batch))
        metrics.append(self._backward(last))
        self._update()
        return torch.stack(metrics).sum(0) if others else metrics[0]

    def _backward(self, micro_batch: MicroBatch) -> Tensor:
        """Add the gradients of a micro-batch; returns its summand of the step's metrics."""
        batch = micro_batch.batch
        real_pass = self.method(self.forward, batch, self.loss)
        real = total = micro_batch.real_fraction * real_pass.loss
        mixed, mixed_means = torch.zeros_like(real), real.new_zeros(4, dtype=torch.float32)
        settings = self.config.mixed
        if settings is not None and batch.mixed_images is not None:
            assert batch.mixed_labels is not None
            assert batch.mixed_kinds is not None
            with mixed_pass(self.network, settings.batch_norm):
                loss, logits = self.method.on_mixed(
                    self.forward, batch.mixed_images, batch.mixed_labels, self.mixed_loss
                )
            mixed = micro_batch.mixed_fraction * loss
            mixed_means = confidence_and_label(logits, batch.mixed_labels, batch.mixed_kinds)
            total = real + settings.weight * mixed
        self.accelerator.backward(total)
        correct = (real_pass.logits.argmax(1) == real_pass.targets).float()
        accuracy = micro_batch.real_fraction * correct.mean()
        metrics = torch.stack([real.detach().float(), mixed.detach().float(), accuracy])
        return torch.cat([metrics, mixed_means])

    def _update(self) -> None:
        average_gradients(self.loss.parameters(), self.accelerator)
        average_gradients(self.method.parameters(), self.accelerator)
        self.method.after_backward(self.network.backbone)
        if self.config.optimiser.clip_norm is not None:
            limit = self.config.optimiser.clip_norm
            self.accelerator.clip_grad_norm_(self.network.parameters(), limit)
        self.optimiser.step()
        self.optimiser.zero_grad()


def prepare_step(
    config: TrainConfig,
    network: Network,
    method: Method,
    loss: RealLoss,
    *,
    accelerator: Accelerator,
) -> TrainingStep:
    """Build the training step, with an optimiser for all parameters; accelerate prepares both."""
    parameters = [p for module in (network, loss, method) for p in module.parameters()]
    forward, optimiser = accelerator.prepare(
        TrainingForward(network, compiled=config.compile),
        build_optimiser(config.optimiser, parameters),
    )
    return TrainingStep(
        config=config,
        network=network,
        forward=forward,
        method=method,
        loss=loss,
        mixed_loss=build_mixed_loss(config.mixed.loss if config.mixed else "l2"),
        optimiser=optimiser,
        accelerator=accelerator,
    )


class TrainingForward(nn.Module):
    """The forward pass of a network in training.

    accelerate replaces a module's forward by one of another precision, and torch.compile replaces
    its class. Both change this wrapper and not the network, which keeps the names of its state, can
    be copied, and is measured in float32.

    Raises:
        InputError: there is no folder for compiled programs.
    """

    def __init__(self, network: nn.Module, *, compiled: bool) -> None:
        super().__init__()
        if compiled:
            keep_compiled_to_ourselves()
        # Batches of real and of mixed images differ in size; each size gets its own program.
        self.network = torch.compile(network, dynamic=False) if compiled else network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, K] and features [N, D] of images, uint8 or float [N, S, S, 3]."""
        logits, features = self.network(images)
        return logits, features


def check_compiler(device: torch.device) -> None:
    """Raise InputError if the compiler is missing that torch.compile calls for this device."""
    variable, program = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(variable, program)
    if shutil.which(compiler) is None:
        remedy = f"needs the compiler {compiler}, which is missing; install it, name another in "
        raise InputError("compile", True, f"{remedy}{variable}, or leave compile off")


def confidence_and_label(logits: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
    """Mean predicted probability and mean label of mixed images, of the class with largest label.

    Args:
        logits, labels: [M, K].
        kinds: as `TrainingBatch.mixed_kinds`, [M, 2]. Results of micro-batches add up to the means
            over the batch.
    Returns:
        float32 [4], without gradient: for end points the mean probability of the class with the
        largest label, and the mean of that label; then the same for inner images. Both are 0
        where a batch has no such images.
    """
    label, label_class = labels.max(1, keepdim=True)  # [M, 1]
    confidence = logits.detach().float().softmax(1).gather(1, label_class)
    pairs = torch.cat([confidence, label], dim=1)  # [M, 2]
    return (kinds[:, :, None] * pairs[:, None]).sum(0).flatten()


STEP_METRICS = (
    "loss",
    "mixed_loss",
    "accuracy",
    "mixed_confidence_end",
    "mixed_label_end",
    "mixed_confidence_interior",
    "mixed_label_interior",
)
LOSS_METRICS = {"real": 0, "mixed": 1}  # columns of the metrics that must be finite
CHECK_EVERY = 50  # steps between checks, each of which waits for the device


class EpochRecord:
    """The STEP_METRICS of every step of an epoch, of this process.

    Args:
        steps: number of steps of the epoch.
        accelerator: of the processes, which all raise Diverged if one of them does.
    """

    def __init__(self, steps: int, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.metrics = torch.zeros(steps, len(STEP_METRICS), device=accelerator.device)

    def note(self, step: int, metrics: Tensor) -> None:
        """Store the metrics of a step, float32 [7].

        Raises:
            Diverged: as `check`, which is called every CHECK_EVERY steps.
        """
        self.metrics[step] = metrics
        if (step + 1) % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raise Diverged, in every process, for the first loss that is NaN or infinite."""
        not_finite = ~self.metrics[:, : len(LOSS_METRICS)].isfinite().flatten()
        indices = torch.arange(len(not_finite), device=not_finite.device)
        first = torch.where(not_finite, indices, len(not_finite)).min()
        index = int(self.accelerator.gather(first[None]).min())
        if index < len(not_finite):
            step, column = divmod(index, len(LOSS_METRICS))
            position = f"step {step + 1} of {len(self.metrics)}"
            raise Diverged(f"{position}: the {list(LOSS_METRICS)[column]} loss is NaN or infinite")

    def means(self) -> dict[str, float]:
        """Means over all steps and processes, each of which has equally many images."""
        means = self.accelerator.reduce(self.metrics.double().mean(0), reduction="mean")
        return dict(zip(STEP_METRICS, means.tolist(), strict=True))


class Diverged(RuntimeError):
    """A loss or a weight is NaN or infinite; no checkpoint with it has been written."""


def divergence_remedy(mixed_precision: str) -> str:
    """The remedy for a divergence, as the end of a sentence."""
    change = "lower optimiser.learning_rate"
    if mixed_precision != "no":
        change += f" or leave mixed_precision {mixed_precision}"
    return f"{change}, and train in a fresh run folder"


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise Diverged, which names the first tensor that has a NaN or infinite value."""
    floating = {name: t for name, t in tensors.items() if t.is_floating_point()}
    # One tensor, so that the host waits for the device only once.
    finite = torch.stack([tensor.isfinite().all() for tensor in floating.values()])
    for name, is_finite in zip(floating, finite.tolist(), strict=True):
        if not is_finite:
            raise Diverged(f"after the epoch's last step {name} is NaN or infinite")


def build_optimiser(
    config: OptimiserConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    if config.name != "sgd":
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
        return kind(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def learning_rate(config: OptimiserConfig, step: int, *, steps: int, epochs: int) -> float:
    """The learning rate of a step; it depends on the step alone, so there is no state to save.

    Args:
        step: counted from 0, over all epochs.
        steps: steps per epoch.
    """
    rate = config.learning_rate
    if config.schedule == "multistep":
        rate *= config.factor ** sum(step >= steps * epoch for epoch in config.milestones)
    elif config.schedule == "cosine":
        rate *= (1 + math.cos(math.pi * step / (steps * epochs))) / 2
    return rate * min(1.0, (step + 1) / (config.warmup_steps + 1))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
