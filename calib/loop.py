"""The trainer: epochs of a stage, steps of an epoch, and the state from which both resume."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from semix.calib.checkpoint import Checkpoint, MidEpochState, State, StateDict, save_checkpoint
from semix.calib.config import OptimiserConfig
from semix.calib.divergence import Diverged
from semix.calib.epoch_lines import SILENT, EpochLines
from semix.calib.losses.base import Outputs
from semix.calib.optimiser import learning_rate, set_learning_rate
from semix.calib.processes import StopVote, wait_for_all
from semix.calib.run_folder import HISTORY
from semix.calib.selection import EpochSelection, validation_measures
from semix.calib.stopping import Interrupted, ShouldStop, Stopped, never
from semix.calib.trackers import Tracking
from semix.data.files import MAX_JSON, add_path_to_disk_errors, read_bytes, write_atomically

CHECKPOINT = "checkpoint"

EpochMetrics = dict[str, float | None]


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

    def run(self, stage: "Stage", checkpoint: Checkpoint | None) -> None:
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

    def _train(self, stage: "Stage", epoch: int, progress_lines: EpochLines) -> EpochMetrics:
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

    def _save(self, stage: "Stage", epoch: int) -> None:
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


class Stage(ABC):
    """A stage of training, whose state can be saved after any step.

    A subclass says what its batches, its update and its metrics are.

    Attributes:
        name: of the stage in checkpoints, history and progress lines.
        epochs: number of epochs; the stage may end earlier.
        steps: per epoch.
        images_per_epoch: real images, over all processes.
        optimiser: with the learning rate of `optimiser_config`.
        selection: selects the epoch whose weights are kept.
        mid_epoch: set if an epoch was stopped; part of the state.
    """

    name: ClassVar[str]
    epochs: int
    steps: int
    images_per_epoch: int
    accelerator: Accelerator
    optimiser: torch.optim.Optimizer
    optimiser_config: OptimiserConfig
    selection: EpochSelection
    mid_epoch: MidEpochState | None = None

    @property
    def finished(self) -> bool:
        """Whether the stage ends early, before its last epoch; the same in all processes."""
        return self.selection.finished

    def train_epoch(
        self, epoch: int, stop: ShouldStop = never, progress_lines: EpochLines = SILENT
    ) -> EpochMetrics:
        """Train an epoch, or the rest of it after `mid_epoch`; returns its metrics.

        Raises:
            Diverged: a loss or a weight is NaN or infinite.
            Stopped: `stop` returned true; `mid_epoch` says after which step, or is None before
                the first one.
        """
        self.begin_epoch(epoch, stop)
        steps_done = self._begin_or_resume(epoch)
        try:
            with closing(self.batches_of(epoch, steps_done)) as batches:
                for step, batch in enumerate(batches, steps_done):
                    self._set_learning_rate(epoch * self.steps + step)
                    self.update(step, batch)
                    progress_lines.show_step(epoch, step + 1)
                    if step + 1 < self.steps and stop():
                        self._stop(step + 1)
            metrics = self.end_steps()
        except Diverged as error:
            raise Diverged(f"{error}; {self.remedy}") from None
        return self.end_epoch(epoch, metrics) | self._judge(epoch)

    @property
    @abstractmethod
    def remedy(self) -> str:
        """What to do if a step diverges, as the end of a sentence."""

    @abstractmethod
    def begin_epoch(self, epoch: int, stop: ShouldStop) -> None:
        """Prepare the steps of an epoch, also of one that is resumed. Raises Stopped."""

    @abstractmethod
    def batches_of(self, epoch: int, steps_done: int) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, after those that are done."""

    @abstractmethod
    def update(self, step: int, batch: Any) -> None:
        """Make one update, and note its metrics in the progress of the epoch."""

    @abstractmethod
    def end_steps(self) -> EpochMetrics:
        """The metrics of the epoch's steps. Raises Diverged if a loss or weight is not finite."""

    @abstractmethod
    def end_epoch(self, epoch: int, metrics: EpochMetrics) -> EpochMetrics:
        """Called with the metrics of the steps; returns them with those of the whole epoch."""

    @abstractmethod
    def validation_outputs(self) -> Outputs:
        """The outputs of `trained`."""

    @property
    @abstractmethod
    def trained(self) -> nn.Module:
        """The module that is measured on validation images, and exported."""

    @abstractmethod
    def export(self, path: Path, *, digest: str) -> None:
        """Write the selected weights, with the digest of settings and data in the metadata."""

    # Progress within an epoch

    @abstractmethod
    def start_progress(self, epoch: int) -> None:
        """Begin an epoch without steps."""

    @abstractmethod
    def progress(self, steps_done: int) -> StateDict:
        """The progress of the epoch, tensors on the CPU and plain values. Raises Diverged."""

    @abstractmethod
    def load_progress(self, progress: StateDict, steps_done: int) -> None:
        """Restore what `progress` returned."""

    @staticmethod
    @abstractmethod
    def merge_progress(processes: Sequence[StateDict], index: int) -> StateDict:
        """Progress of process `index`, for a resume with another number of processes."""

    def _begin_or_resume(self, epoch: int) -> int:
        """Begin the epoch, or resume from `mid_epoch`; returns the number of steps done."""
        mid_epoch, self.mid_epoch = self.mid_epoch, None
        if mid_epoch is None:
            self.start_progress(epoch)
            return 0
        progress = mid_epoch.restore(self.modules(), self.accelerator, reshard=self.merge_progress)
        self.load_progress(progress, mid_epoch.step)
        return mid_epoch.step

    def _stop(self, steps_done: int) -> None:
        """Set `mid_epoch` and raise Stopped; raises Diverged if a loss or weight is not finite."""
        self.mid_epoch = MidEpochState.gather(
            steps_done,
            self.progress(steps_done),
            modules=self.modules(),
            accelerator=self.accelerator,
        )
        raise Stopped

    # State

    @abstractmethod
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules that have state, by the names of their files in a checkpoint."""

    @abstractmethod
    def own_objects(self) -> StateDict:
        """State of this kind of stage, as tensors and plain values."""

    @abstractmethod
    def load_own_objects(self, objects: StateDict) -> None:
        """Restore what `own_objects` returned, from all objects of the stage."""

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        tensors = {name: module.state_dict() for name, module in self.modules().items()}
        return {**tensors, "best": self.selection.best} if self.selection.best else tensors

    def objects(self) -> StateDict:
        return {
            "optimiser": self.optimiser.state_dict(),
            "selection": self.selection.state_dict(),
            "middle": self.mid_epoch.state_dict() if self.mid_epoch else None,
            **self.own_objects(),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        for name, module in self.modules().items():
            checkpoint.load_module(name, module)
        objects = checkpoint.objects()
        self.optimiser.load_state_dict(objects["optimiser"])
        has_best = objects["selection"]["best_epoch"] is not None
        best = checkpoint.tensors("best") if has_best else {}
        self.selection.load_state_dict(objects["selection"], best)
        self.mid_epoch = MidEpochState.from_checkpoint(objects["middle"])
        self.load_own_objects(objects)

    def _judge(self, epoch: int) -> EpochMetrics:
        """Measure the validation images, if the selection of an epoch needs it."""
        if not self.selection.needs_validation:
            return {}
        measures = validation_measures(
            self.validation_outputs(), scaled=self.selection.needs_temperature
        )
        self.selection.note(measures, self.trained, epoch)
        return {f"validation_{name}": value for name, value in measures.items()}

    def _set_learning_rate(self, step: int) -> None:
        rate = learning_rate(self.optimiser_config, step, steps=self.steps, epochs=self.epochs)
        set_learning_rate(self.optimiser, rate)
