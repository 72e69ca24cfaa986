"""Walk the epochs of a training stage: go on from a checkpoint, note, save, stop when asked."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from calib.checkpoint import Checkpoint, save_checkpoint
from calib.divergence import Diverged
from calib.progress import Progress
from calib.trackers import Tracking
from data.files import write_atomically

HISTORY = "history.jsonl"
CHECKPOINT = "checkpoint"

Figures = dict[str, float | None]


class Stage(Protocol):
    """What is trained epoch by epoch, with all of its state at the end of an epoch."""

    name: str
    epochs: int
    images: int  # real images an epoch, over all processes

    @property
    def finished(self) -> bool:
        """Whether it ends before its last epoch; part of its state, alike in every process."""

    def train_epoch(self, epoch: int) -> Figures: ...

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]: ...

    def objects(self) -> Mapping[str, Any]: ...

    def load(self, checkpoint: Checkpoint) -> None: ...

    def export(self, path: Path, *, digest: str) -> None: ...


class Interrupted(Exception):
    """Training was asked to stop; a checkpoint of all that is done has been written."""


@dataclass
class Walk:
    """How the epochs of one seed are walked, over its stages.

    Attributes:
        folder: of the seed.
        label: begins each line of progress.
        state: JSON values for every checkpoint, which say whose it is.
        every: epochs between checkpoints.
        stop: asked after every epoch, in every process.
        tracking: gets the figures of every epoch, in the main process.
        position: epochs done over all stages.
        seconds: spent, with those before an interruption.
    """

    folder: Path
    label: str
    state: Mapping[str, Any]
    every: int
    accelerator: Accelerator
    stop: Callable[[], bool]
    tracking: Tracking
    position: int = 0
    seconds: float = 0.0

    def go_on_from(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Take position and seconds from a checkpoint, which is returned.

        The history loses the epochs that no checkpoint holds; they are trained again.
        """
        if checkpoint is not None:
            self.position, self.seconds = (checkpoint.state[k] for k in ("position", "seconds"))
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
            stopping = _any_process(self.stop(), self.accelerator)
            if self.accelerator.is_main_process:
                progress.show(epoch + 1, figures, last=last)
                if stopping or last or (epoch + 1) % self.every == 0:
                    self._save(stage, epoch + 1)
            if stopping:
                raise Interrupted(f"{label}: stopped after epoch {epoch + 1}")

    def _train(self, stage: Stage, epoch: int) -> Figures:
        """Train an epoch and note its figures."""
        started = time.perf_counter()
        try:
            figures = stage.train_epoch(epoch)
        except Diverged as error:
            raise Diverged(f"{self.label} {stage.name} epoch {epoch + 1}: {error}") from None
        seconds = time.perf_counter() - started
        self.position += 1
        self.seconds += seconds
        if self.accelerator.is_main_process:
            line = {"stage": stage.name, "epoch": epoch, "seconds": seconds, **figures}
            with (self.folder / HISTORY).open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.tracking.note(self.position, line)
        return figures

    def _save(self, stage: Stage, epoch: int) -> None:
        place = {"stage": stage.name, "epoch": epoch, "position": self.position}
        save_checkpoint(
            self.folder / CHECKPOINT,
            self.position,
            tensors=stage.tensors(),
            objects=stage.objects(),
            state={**self.state, **place, "seconds": self.seconds},
        )


def _any_process(flag: bool, accelerator: Accelerator) -> bool:
    votes = torch.tensor([float(flag)], device=accelerator.device)
    return bool(accelerator.reduce(votes, reduction="sum").item() > 0)
