"""Walk the epochs of a training stage: go on from a checkpoint, note, save, stop when asked."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor

from calib.checkpoint import Checkpoint, save_checkpoint
from calib.divergence import Diverged
from calib.middle import Middle
from calib.processes import wait_for_all
from calib.progress import Progress
from calib.run_folder import HISTORY
from calib.stopping import Interrupted, Stop, Stopped, Vote
from calib.trackers import Tracking
from data.files import write_atomically

CHECKPOINT = "checkpoint"

Figures = dict[str, float | None]


class Stage(Protocol):
    """What is trained epoch by epoch, with all of its state after any step."""

    name: str
    epochs: int
    images: int  # real images an epoch, over all processes
    middle: Middle | None  # where an epoch was stopped; part of its state

    @property
    def finished(self) -> bool:
        """Whether it ends before its last epoch; part of its state, alike in every process."""

    def train_epoch(self, epoch: int, stop: Stop) -> Figures: ...

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]: ...

    def objects(self) -> Mapping[str, Any]: ...

    def load(self, checkpoint: Checkpoint) -> None: ...

    def export(self, path: Path, *, digest: str) -> None: ...


@dataclass
class Walk:
    """How the epochs of one seed are walked, over its stages.

    Attributes:
        folder: of the seed.
        label: begins each line of progress.
        state: JSON values for every checkpoint, which say whose it is.
        every: epochs between checkpoints.
        stop: asked after every step, in every process.
        tracking: gets the figures of every epoch, in the main process.
        position: epochs done over all stages.
        seconds: spent on those epochs, with what was before an interruption.
        begun_s: seconds spent on an epoch that was stopped in its middle.
    """

    folder: Path
    label: str
    state: Mapping[str, Any]
    every: int
    accelerator: Accelerator
    stop: Stop
    tracking: Tracking
    position: int = 0
    seconds: float = 0.0
    begun_s: float = 0.0
    vote: Vote = field(init=False)

    def __post_init__(self) -> None:
        self.vote = Vote(self.stop, self.accelerator)

    def go_on_from(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Take position and seconds from a checkpoint, which is returned.

        The history loses the epochs that no checkpoint holds; they are trained again.
        """
        if checkpoint is not None:
            self.position, self.seconds = (checkpoint.state[k] for k in ("position", "seconds"))
            self.begun_s = checkpoint.state.get("begun_s", 0.0)
        if self.accelerator.is_main_process:
            path = self.folder / HISTORY
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            write_atomically(path, b"".join(lines[: self.position]))
            self.tracking.start([json.loads(line) for line in lines[: self.position]])
        return checkpoint

    def run(self, stage: Stage, checkpoint: Checkpoint | None) -> None:
        """Train a stage to its end.

        Args:
            checkpoint: of this stage, to go on from; None begins the stage.
        Raises:
            Interrupted: `stop` said so in some process.
            Diverged: a loss or weight is NaN or infinite; nothing of that epoch is kept.
        """
        first = 0
        if checkpoint is not None:
            stage.load(checkpoint)
            first = checkpoint.state["epoch"]
        label = f"{self.label} {stage.name}"
        progress = Progress(label, epochs=stage.epochs, images=stage.images, first=first)
        for epoch in range(first, stage.epochs):
            if stage.finished:
                break
            figures = self._train(stage, epoch)
            last = epoch + 1 == stage.epochs or stage.finished
            stopping = self.vote.look()
            if stopping or last or (epoch + 1) % self.every == 0:
                self._save(stage, epoch + 1)
            if self.accelerator.is_main_process:  # after the checkpoint: nobody may be listening
                progress.show(epoch + 1, figures, last=last)
            if stopping:
                raise Interrupted(f"{label}: stopped after epoch {epoch + 1}")

    def _train(self, stage: Stage, epoch: int) -> Figures:
        """Train an epoch and note its figures."""
        started = time.perf_counter()
        try:
            figures = stage.train_epoch(epoch, self.vote)
        except Diverged as error:
            raise Diverged(f"{self.label} {stage.name} epoch {epoch + 1}: {error}") from None
        except Stopped:
            self.begun_s += time.perf_counter() - started
            self._save(stage, epoch)
            step = stage.middle.step if stage.middle else 0
            where = f"stopped in epoch {epoch + 1} after step {step}"
            raise Interrupted(f"{self.label} {stage.name}: {where}") from None
        seconds = self.begun_s + time.perf_counter() - started
        self.position += 1
        self.seconds += seconds
        self.begun_s = 0.0
        if self.accelerator.is_main_process:
            line = {"stage": stage.name, "epoch": epoch, "seconds": seconds, **figures}
            with (self.folder / HISTORY).open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.tracking.note(self.position, line)
        return figures

    def _save(self, stage: Stage, epoch: int) -> None:
        """Write a checkpoint; no process goes on, or ends, before it is there.

        Args:
            epoch: epochs done of the stage.
        """
        if self.accelerator.is_main_process:
            step = stage.middle.step if stage.middle else 0
            place = {"stage": stage.name, "epoch": epoch, "step": step, "position": self.position}
            save_checkpoint(
                self.folder / CHECKPOINT,
                self.position,
                step=step,
                tensors=stage.tensors(),
                objects=stage.objects(),
                state={**self.state, **place, "seconds": self.seconds, "begun_s": self.begun_s},
            )
        wait_for_all(self.accelerator)
