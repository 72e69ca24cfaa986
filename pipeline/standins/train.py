"""Train both stand-ins, CLIP in a process beside, then save them with their cards."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save

from data.real import RealDataset
from pipeline.standins.autoencoder import train_autoencoder
from pipeline.standins.card import model_cards
from pipeline.standins.clip import clip_tokenizer, train_clip
from pipeline.standins.denoiser import train_pipeline
from pipeline.standins.progress import Report
from pipeline.standins.recipe import Recipe
from pipeline.standins.text import Captions, build_tokenizer, captions_of
from pipeline.standins.training import TrainingImages, load_images

WORTH_A_PROCESS = 100  # steps of CLIP; a process imports for as long as so many take


def train_both(
    real: RealDataset, folder: Path, *, recipe: Recipe, digest: str, report: Report
) -> dict[str, float]:
    """Train on `real.train` and write `folder/diffusion` and `folder/clip`.

    Returns the seconds of each training; of CLIP's, those that were left when the others ended.
    """
    seconds: dict[str, float] = {}
    names = real.class_names
    captions = captions_of(names, recipe.templates)
    tokenizer = build_tokenizer(names, captions)
    images = load_images(real.train, limit=recipe.max_images)
    clip_tokenizer(names, captions)  # refuses names before anything is trained
    with (
        one_thread(),
        clip_training(
            folder / "clip", images, names, captions, recipe=recipe, report=report
        ) as finish_clip,
    ):
        with _timed(seconds, "autoencoder"):
            vae = train_autoencoder(images, recipe, report)
        with _timed(seconds, "denoiser"):
            pipeline = train_pipeline(
                images, captions, vae=vae, tokenizer=tokenizer, recipe=recipe, report=report
            )
        with _timed(seconds, "CLIP"):
            finish_clip()
    pipeline.save_pretrained(folder / "diffusion", safe_serialization=True)
    cards = model_cards(names, recipe, digest=digest, images=len(images.pixels), size=images.size)
    for kind, card in zip(("diffusion", "clip"), cards, strict=True):
        (folder / kind / "README.md").write_text(card, encoding="utf-8")
    return seconds


@contextmanager
def clip_training(
    folder: Path,
    images: TrainingImages,
    names: tuple[str, ...],
    captions: Captions,
    *,
    recipe: Recipe,
    report: Report,
) -> Iterator[Callable[[], None]]:
    """What is yielded trains CLIP, or waits for a process that did so beside the block."""
    if recipe.clip.steps < WORTH_A_PROCESS:
        yield lambda: train_clip(images, names, captions, recipe=recipe, report=report).save(folder)
        return
    command = [sys.executable, "-P", "-m", "pipeline.standins.clip", str(folder)]
    told = {"class_names": names, "captions": captions, "recipe": asdict(recipe)}
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None

        def wait() -> None:
            if status := process.wait():
                raise RuntimeError(f"training CLIP ended with exit status {status}")

        try:
            with process.stdin as pipe:
                pipe.write(json.dumps(told).encode() + b"\n")
                pipe.write(save({"pixels": images.pixels, "targets": images.targets}))
            yield wait
        finally:
            process.kill()


@contextmanager
def one_thread() -> Iterator[None]:
    """Work this small gains little from a second thread, and loses much where a core is busy.

    It also makes the weights independent of how many cores there are.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[stage] = time.monotonic() - started
