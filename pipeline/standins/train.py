"""Train both stand-ins, one after the other, then save them with their cards."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from data.real import RealDataset
from pipeline.standins.autoencoder import train_autoencoder
from pipeline.standins.card import model_cards
from pipeline.standins.clip import train_clip
from pipeline.standins.denoiser import train_pipeline
from pipeline.standins.progress import Report
from pipeline.standins.recipe import Recipe
from pipeline.standins.text import build_tokenizer, captions_of
from pipeline.standins.training import load_images


def train_both(
    real: RealDataset, folder: Path, *, recipe: Recipe, digest: str, report: Report
) -> dict[str, float]:
    """Train on `real.train` and write `folder/diffusion` and `folder/clip`.

    Nothing is written before all is trained. Returns the seconds of each training.
    """
    seconds: dict[str, float] = {}
    names = real.class_names
    captions = captions_of(names, recipe.templates)
    tokenizer = build_tokenizer(names, captions)
    images = load_images(real.train, limit=recipe.max_images)
    with one_thread():
        with _timed(seconds, "CLIP"):
            clip = train_clip(images, names, captions, recipe=recipe, report=report)
        with _timed(seconds, "autoencoder"):
            vae = train_autoencoder(images, recipe, report)
        with _timed(seconds, "denoiser"):
            pipeline = train_pipeline(
                images, captions, vae=vae, tokenizer=tokenizer, recipe=recipe, report=report
            )
    pipeline.save_pretrained(folder / "diffusion", safe_serialization=True)
    clip.save(folder / "clip")
    cards = model_cards(names, recipe, digest=digest, images=len(images.pixels), size=images.size)
    for kind, card in zip(("diffusion", "clip"), cards, strict=True):
        (folder / kind / "README.md").write_text(card, encoding="utf-8")
    return seconds


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
