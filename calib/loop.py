"""The training loop: epochs of a stage, the step, its figures, checks for divergence."""

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

from semix.calib.batches import MicroBatch, TrainingBatch, micro_batches
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

Figures = dict[str, float | None]


class TrainingStage(Protocol):
    """A stage of training, with all of its state after any step."""

    name: str
    epochs: int
    images: int  # real images per epoch, over all processes
    steps: int  # per epoch
    mid_epoch: MidEpochState | None  # where an epoch was stopped; part of the state

    @property
    def finished(self) -> bool:
        """Whether the stage ends before its last epoch; equal in all processes, part of state."""

    def train_epoch(self, epoch: int, stop: ShouldStop, lines: EpochLines) -> Figures: ...

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]: ...

    def objects(self) -> StateDict: ...

    def load(self, checkpoint: Checkpoint) -> None: ...

    def export(self, path: Path, *, digest: str) -> None: ...


@dataclass
class Trainer:
    """Trains one seed epoch by epoch, over its stages: checkpoints, history, progress.

    Attributes:
        folder: of the seed.
        label: begins each line of progress.
        config, digest: of the run; written into every checkpoint.
        every: epochs between checkpoints.
        stop: asked after every step, in every process.
        tracking: gets the figures of every epoch, in the main process.
        position: epochs done over all stages.
        seconds: spent on those epochs, including before an interruption.
        begun_s: seconds spent on an epoch that was stopped before its end.
    """

    folder: Path
    label: str
    config: dict[str, object]
    digest: str
    every: int
    accelerator: Accelerator
    stop: ShouldStop
    tracking: Tracking
    position: int = 0
    seconds: float = 0.0
    begun_s: float = 0.0
    vote: StopVote = field(init=False)

    def __post_init__(self) -> None:
        self.vote = StopVote(self.stop, self.accelerator)

    def resume_from(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Take position and seconds from a checkpoint, which is returned.

        Epochs after the checkpoint are removed from the history; they are trained again.
        """
        if checkpoint is not None:
            self.position = checkpoint.state["position"]
            self.seconds = checkpoint.state["seconds"]
            self.begun_s = checkpoint.state["begun_s"]
        if self.accelerator.is_main_process:
            path = self.folder / HISTORY
            lines = read_bytes(path, max_bytes=MAX_JSON).splitlines(True) if path.is_file() else []
            write_atomically(path, b"".join(lines[: self.position]))
            self.tracking.start([json.loads(line) for line in lines[: self.position]])
        return checkpoint

    def run(self, stage: TrainingStage, checkpoint: Checkpoint | None) -> None:
        """Train a stage to its end.

        Args:
            checkpoint: of this stage, to resume from; None begins the stage.
        Raises:
            Interrupted: `stop` returned true in some process.
            Diverged: a loss or weight is NaN or infinite; the epoch is not saved.
        """
        first = 0
        if checkpoint is not None:
            stage.load(checkpoint)
            first = checkpoint.state["epoch"]
        label = f"{self.label} {stage.name}"
        lines = EpochLines(
            label,
            epochs=stage.epochs,
            images=stage.images,
            steps=stage.steps,
            first=first,
            printing=self.accelerator.is_main_process,
        )
        for epoch in range(first, stage.epochs):
            if stage.finished:
                break
            figures = self._train(stage, epoch, lines)
            last = epoch + 1 == stage.epochs or stage.finished
            stopping = self.vote.ask_together()
            if stopping or last or (epoch + 1) % self.every == 0:
                self._save(stage, epoch + 1)
            # After the checkpoint, as printing fails if nobody reads standard output.
            lines.show_epoch(epoch + 1, figures, last=last)
            if stopping:
                raise Interrupted(f"{label}: stopped after epoch {epoch + 1}")

    def _train(self, stage: TrainingStage, epoch: int, lines: EpochLines) -> Figures:
        """Train an epoch and write its figures to the history."""
        started = time.perf_counter()
        try:
            figures = stage.train_epoch(epoch, self.vote, lines)
        except Diverged as error:
            raise Diverged(f"{self.label} {stage.name} epoch {epoch + 1}: {error}") from None
        except Stopped:
            self.begun_s += time.perf_counter() - started
            self._save(stage, epoch)
            step = stage.mid_epoch.step if stage.mid_epoch else 0
            where = f"stopped in epoch {epoch + 1} after step {step}"
            raise Interrupted(f"{self.label} {stage.name}: {where}") from None
        seconds = self.begun_s + time.perf_counter() - started
        self.position += 1
        self.seconds += seconds
        self.begun_s = 0.0
        if self.accelerator.is_main_process:
            line = {"stage": stage.name, "epoch": epoch, "seconds": seconds, **figures}
            path = self.folder / HISTORY
            with add_path_to_disk_errors(path), path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.tracking.note(self.position, line)
        return figures

    def _save(self, stage: TrainingStage, epoch: int) -> None:
        """Write a checkpoint; all processes wait until it is written.

        Args:
            epoch: epochs done of the stage.
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
                "begun_s": self.begun_s,
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
    """L = L_real(real images) + weight * L_mixed(mixed images), one update per batch.

    Two forward passes share the network, the mixed one last, as in CSM's code. The real loss and
    its state never see a mixed image. Parameters of loss and method are in the optimiser, outside
    the clipping.

    Attributes:
        forward: the network as accelerate has prepared it.
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
        """Make one update; returns the FIGURES of this process's share, float32 [7]."""
        *first, last = micro_batches(batch, self.config.accumulate)
        figures = []
        for part in first:
            with self.accelerator.no_sync(self.forward):
                figures.append(self._backward(part))
        figures.append(self._backward(last))
        self._update()
        return torch.stack(figures).sum(0) if first else figures[0]

    def _backward(self, part: MicroBatch) -> Tensor:
        """Add a part's gradients; returns its share of the step's figures."""
        batch = part.batch
        outcome = self.method(self.forward, batch, self.loss)
        real = total = part.real * outcome.loss
        mixed, mixed_means = torch.zeros_like(real), real.new_zeros(4, dtype=torch.float32)
        settings = self.config.mixed
        if settings is not None and batch.mixed_images is not None:
            assert batch.mixed_labels is not None
            assert batch.mixed_kinds is not None
            with mixed_pass(self.network, settings.batch_norm):
                loss, logits = self.method.on_mixed(
                    self.forward, batch.mixed_images, batch.mixed_labels, self.mixed_loss
                )
            mixed = part.mixed * loss
            mixed_means = confidence_and_label(logits, batch.mixed_labels, batch.mixed_kinds)
            total = real + settings.weight * mixed
        self.accelerator.backward(total)
        right = part.real * (outcome.logits.argmax(1) == outcome.targets).float().mean()
        figures = torch.stack([real.detach().float(), mixed.detach().float(), right])
        return torch.cat([figures, mixed_means])

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
    """A step and an optimiser for the parameters of all modules, prepared by accelerate."""
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
    """Runs a network in training.

    accelerate replaces the forward of a module by one of another precision, and torch.compile
    replaces its class. This wrapper takes both changes, so that the network keeps the names of its
    state, can be copied, and is measured in float32.

    Raises:
        InputError: there is no folder for compiled programs.
    """

    def __init__(self, network: nn.Module, *, compiled: bool) -> None:
        super().__init__()
        if compiled:
            keep_compiled_to_ourselves()
        # Real and mixed images come in batches of two sizes; each gets its own program.
        self.network = torch.compile(network, dynamic=False) if compiled else network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 or float [N, S, S, 3] to logits [N, K] and features [N, D]."""
        logits, features = self.network(images)
        return logits, features


def check_compiler(device: torch.device) -> None:
    """Raises InputError if torch.compile lacks the compiler that it calls for this device."""
    variable, program = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(variable, program)
    if shutil.which(compiler) is None:
        remedy = f"needs the compiler {compiler}, which is not there; install it, name another in "
        raise InputError("compile", True, f"{remedy}{variable}, or leave compile off")


def confidence_and_label(logits: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
    """Mean confidence and mean label of mixed images, for the class with the largest label.

    Args:
        logits, labels: [M, K].
        kinds: as `TrainingBatch.mixed_kinds`, [M, 2]; rows of a part give its share of the means.
    Returns:
        float32 [4], without gradient: for end points the mean probability of the class with the
        largest label, and the mean of that label; then both for inner images; 0 without images.
    """
    label, largest = labels.max(1, keepdim=True)  # [M, 1]
    confidence = logits.detach().float().softmax(1).gather(1, largest)
    pairs = torch.cat([confidence, label], dim=1)  # [M, 2]
    return (kinds[:, :, None] * pairs[:, None]).sum(0).flatten()


FIGURES = (
    "loss",
    "mixed_loss",
    "accuracy",
    "mixed_confidence_end",
    "mixed_label_end",
    "mixed_confidence_interior",
    "mixed_label_interior",
)
LOSS_FIGURES = {"real": 0, "mixed": 1}  # the figures that must be finite
CHECK_EVERY = 50  # steps between two checks, each of which waits for the device


class EpochRecord:
    """The FIGURES of this process's share of every step.

    Args:
        steps: of the epoch.
        accelerator: of the processes, which check and stop together.
    """

    def __init__(self, steps: int, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.figures = torch.zeros(steps, len(FIGURES), device=accelerator.device)

    def note(self, step: int, figures: Tensor) -> None:
        """Store the figures of a step, float32 [7].

        Raises:
            Diverged: every CHECK_EVERY steps, as `check`.
        """
        self.figures[step] = figures
        if (step + 1) % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raises Diverged, in every process, for the first loss that is NaN or infinite."""
        bad = ~self.figures[:, : len(LOSS_FIGURES)].isfinite().flatten()
        indices = torch.arange(len(bad), device=bad.device)
        first = torch.where(bad, indices, len(bad)).min()
        index = int(self.accelerator.gather(first[None]).min())
        if index < len(bad):
            step, part = divmod(index, len(LOSS_FIGURES))
            where = f"step {step + 1} of {len(self.figures)}"
            raise Diverged(f"{where}: the {list(LOSS_FIGURES)[part]} loss is NaN or infinite")

    def means(self) -> dict[str, float]:
        """Means over steps and processes, which all have equally many images."""
        means = self.accelerator.reduce(self.figures.double().mean(0), reduction="mean")
        return dict(zip(FIGURES, means.tolist(), strict=True))


class Diverged(RuntimeError):
    """A loss or a weight is NaN or infinite; no checkpoint holds it."""


def divergence_remedy(mixed_precision: str) -> str:
    """The remedy for a divergence, as the end of a sentence."""
    change = "lower optimiser.learning_rate"
    if mixed_precision != "no":
        change += f" or leave mixed_precision {mixed_precision}"
    return f"{change}, and train in a fresh run folder"


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises Diverged if a value is NaN or infinite; names the first such tensor."""
    floating = {name: t for name, t in tensors.items() if t.is_floating_point()}
    finite = torch.stack([tensor.isfinite().all() for tensor in floating.values()])  # one wait
    for name, good in zip(floating, finite.tolist(), strict=True):
        if not good:
            raise Diverged(f"after its last step {name} is NaN or infinite")


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
    """The learning rate of one step, a function of the step alone: no state to save.

    Args:
        step: from 0, over all epochs.
        steps: per epoch.
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
