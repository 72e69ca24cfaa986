"""Recipes for training small models, derived from the data, and the display of progress."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from semix.data.pace import Throttle, duration
from semix.data.printable import print_line

TEMPLATES = (
    "a photo of a {class}",  # the template that generation uses by default
    "a picture of a {class}",
    "an image of the {class}",
)


@dataclass(frozen=True)
class TrainingStage:
    """The length and speed of one training."""

    steps: int
    batch_size: int
    learning_rate: float  # peak; after a warm-up, followed by a cosine decay to 0


@dataclass(frozen=True)
class Recipe:
    """Settings of the four small models. Widths are channels; a transformer head is 16 wide."""

    autoencoder: TrainingStage
    denoiser: TrainingStage
    clip: TrainingStage
    autoencoder_widths: tuple[int, ...] = (16, 16, 32)  # all levels but the last halve the image
    latent_channels: int = 4
    kl_weight: float = 1e-6  # of the posterior's divergence from N(0, 1), per latent value
    denoiser_widths: tuple[int, ...] = (32, 32)
    text_width: int = 64
    text_layers: int = 2
    dropped_captions: float = 0.1  # fraction of captions that become "", for guidance
    clip_width: int = 64
    clip_layers: int = 3
    clip_grid: int = 4  # patches along each side of the image
    clip_features: int = 64
    average_decay: float = 0.99  # of the moving average of weights, which is the trained model
    templates: tuple[str, ...] = TEMPLATES  # of captions; the bare name is a further caption
    max_images: int = 4096  # evenly over the classes; the training is too short for more
    seed: int = 0


def recipe_for(*, num_images: int, image_size: int) -> Recipe:
    """The default recipe: about a minute on two cores for 300 images of 32 x 32.

    Args:
        num_images: images in the training split.
        image_size: side in pixels.
    """
    growth = min(3.0, max(1.0, sqrt(num_images / 300)))  # more images need more steps
    large = image_size >= 64  # one more level, so that the latents stay 8 to 16 wide
    return Recipe(
        autoencoder=TrainingStage(round(300 * growth), 12, 4e-3),
        denoiser=TrainingStage(round(500 * growth), 32, 2e-3),
        clip=TrainingStage(round(300 * growth), 48, 2e-3),
        autoencoder_widths=(16, 16, 32, 32) if large else (16, 16, 32),
        clip_grid=8 if large else 4,
    )


def medium_recipe(*, image_size: int) -> Recipe:
    """A recipe for tens of thousands of images of 32 x 32.

    On the 55,000 of Fashion-MNIST it took 63 minutes on two busy cores, 44 of them the denoiser; a
    classifier of real images recognised 95 % of its images and 84 % of real ones.
    A training that is interrupted goes on where it was five minutes earlier or less.
    """
    large = image_size >= 64
    return Recipe(
        autoencoder=TrainingStage(5000, 32, 2e-3),
        denoiser=TrainingStage(9000, 64, 1e-3),
        clip=TrainingStage(4000, 96, 1e-3),
        autoencoder_widths=(32, 32, 64, 64) if large else (32, 32, 64),
        denoiser_widths=(64, 128),
        clip_width=96,
        clip_grid=8,
        clip_features=96,
        average_decay=0.999,
        max_images=60_000,
    )


def large_recipe(*, image_size: int) -> Recipe:
    """A recipe for a GPU and tens of thousands of images.

    Each training is meant to take minutes on an H100, but none has run there yet.
    """
    return Recipe(
        autoencoder=TrainingStage(4000, 256, 1e-3),
        denoiser=TrainingStage(12_000, 512, 1e-3),
        clip=TrainingStage(4000, 512, 1e-3),
        autoencoder_widths=(64, 128, 128, 128) if image_size >= 64 else (64, 128, 128),
        denoiser_widths=(192, 384),
        text_width=256,
        text_layers=4,
        clip_width=256,
        clip_layers=6,
        clip_grid=8,
        clip_features=256,
        average_decay=0.999,
        max_images=200_000,
    )


def tiny_recipe(*, image_size: int) -> Recipe:
    """A recipe of six steps per training: useless models, to test a pipeline in seconds."""
    return Recipe(
        autoencoder=TrainingStage(6, 16, 3e-3),
        denoiser=TrainingStage(6, 16, 2e-3),
        clip=TrainingStage(6, 32, 2e-3),
        autoencoder_widths=(16, 16, 32, 32) if image_size >= 64 else (16, 16, 32),
    )


Report = Callable[[str, int, int], None]  # stage, steps done (0 when it starts), steps in all

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown_progress() -> Iterator[Report]:
    """Yield a `Report` that prints each stage's rate and remaining time on stderr."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    with Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    ) as progress:
        yield _Bars(progress)


class Lines:
    """Prints one line every ten seconds, and one at the end of each stage."""

    def __init__(self) -> None:
        self.stage = ""
        self.started_at = 0.0  # seconds of the monotonic clock
        self.throttle = Throttle(SECONDS_BETWEEN_LINES)

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.started_at = stage, now
            self.throttle.restart()
        if done < total and not self.throttle.is_due():
            return
        self.throttle.restart()
        seconds = max(now - self.started_at, 1e-6)
        rate = done / seconds
        left = (total - done) / rate
        text = f"{duration(left)} left" if done < total else f"took {duration(seconds)}"
        print_line(f"{stage}: {done}/{total}, {rate:.1f} steps/s, {text}", file=sys.stderr)


class _Bars:
    """Shows one bar per stage."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.rows: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self.rows:
            self.rows[stage] = self.progress.add_task(stage, total=total)
        self.progress.update(self.rows[stage], completed=done)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} steps/s" if speed else "")
