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
from data.files import write_atomically

HISTORY = "history.jsonl"
CHECKPOINT = "checkpoint"
QUIET_S = 5.0  # between lines, so that short epochs do not print one each

Figures = dict[str, float | None]


class Stage(Protocol):
    """What is trained epoch by epoch, with all of its state at the end of an epoch."""

    name: str
    epochs: int
    images: int  # real images an epoch, over all processes

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
        position: epochs done over all stages.
        seconds: spent, with those before an interruption.
    """

    folder: Path
    label: str
    state: Mapping[str, Any]
    every: int
    accelerator: Accelerator
    stop: Callable[[], bool]
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
        return checkpoint

    def run(self, stage: Stage, checkpoint: Checkpoint | None) -> None:
        """Train a stage to its end.

        Args:
            checkpoint: of this stage, to go on from; None begins the stage.
        Raises:
            Interrupted: `stop` said so in some process.
        """
        first = 0
        if checkpoint is not None:
            stage.load(checkpoint)
            first = checkpoint.state["epoch"]
        progress = Progress(f"{self.label} {stage.name}", stage, first)
        for epoch in range(first, stage.epochs):
            started = time.perf_counter()
            figures = stage.train_epoch(epoch)
            seconds = time.perf_counter() - started
            self.position += 1
            self.seconds += seconds
            stopping = _any_process(self.stop(), self.accelerator)
            if self.accelerator.is_main_process:
                self._note({"stage": stage.name, "epoch": epoch, "seconds": seconds, **figures})
                progress.show(epoch + 1, figures)
                if stopping or (epoch + 1) % self.every == 0 or epoch + 1 == stage.epochs:
                    self._save(stage, epoch + 1)
            if stopping:
                raise Interrupted(f"{self.label} {stage.name}: stopped after epoch {epoch + 1}")

    def _note(self, line: Mapping[str, Any]) -> None:
        with (self.folder / HISTORY).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _save(self, stage: Stage, epoch: int) -> None:
        place = {"stage": stage.name, "epoch": epoch, "position": self.position}
        save_checkpoint(
            self.folder / CHECKPOINT,
            self.position,
            tensors=stage.tensors(),
            objects=stage.objects(),
            state={**self.state, **place, "seconds": self.seconds},
        )


class Progress:
    """Lines with rate and remaining time, one an epoch but not too many."""

    def __init__(self, label: str, stage: Stage, first: int) -> None:
        self.label, self.stage, self.first = label, stage, first
        self.started = self.shown = time.monotonic()

    def show(self, done: int, figures: Mapping[str, float | None]) -> None:
        now = time.monotonic()
        if now - self.shown < QUIET_S and done < self.stage.epochs:
            return
        self.shown = now
        epoch_s = (now - self.started) / (done - self.first)
        left = round(epoch_s * (self.stage.epochs - done))
        shown = "  ".join(f"{k} {v:.4g}" for k, v in figures.items() if v is not None)
        rate = f"{self.stage.images / epoch_s:,.0f} images/s"
        times = f"{rate}  {left // 60}:{left % 60:02d} left"
        print(f"{self.label} {done}/{self.stage.epochs}  {shown}  {times}", flush=True)


def _any_process(flag: bool, accelerator: Accelerator) -> bool:
    votes = torch.tensor([float(flag)], device=accelerator.device)
    return bool(accelerator.reduce(votes, reduction="sum").item() > 0)
