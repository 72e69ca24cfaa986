"""Train both small models, CLIP in a second process, and save them with their model cards."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import load_file, save
from torch import nn

from semix.data.files import published, write_atomically
from semix.data.printable import print_line
from semix.data.splits import RealDataset
from semix.pipeline.config import PLACEHOLDER
from semix.pipeline.prompts import prompts
from semix.pipeline.standins.diffusion import build_autoencoder, train_autoencoder, train_pipeline
from semix.pipeline.standins.fitting import TrainingImages, load_images
from semix.pipeline.standins.recipe import Recipe, Report
from semix.pipeline.standins.small_clip import clip_tokenizer, state_of, train_clip
from semix.pipeline.standins.text import Captions, build_tokenizer, captions_of

MIN_STEPS_FOR_PROCESS = 100  # of CLIP: these take as long as the imports of a new process


def train_both(
    real: RealDataset,
    folder: Path,
    *,
    recipe: Recipe,
    digest: str,
    report: Report,
    work: Path,
    device: str = "cpu",
) -> dict[str, float]:
    """Train on `real.train` and write `folder/diffusion` and `folder/clip`.

    Args:
        work: a folder for the autoencoder and CLIP once they are trained, which are reused after
            an interruption.
    Returns:
        The seconds of each training; for CLIP, those after the end of the other trainings.
    """
    seconds: dict[str, float] = {}
    names = real.class_names
    captions = captions_of(names, recipe.templates)
    tokenizer = build_tokenizer(names, captions)
    images = load_images(real.train, limit=recipe.max_images).on(device)
    clip_tokenizer(names, captions)  # checks names before anything is trained
    with (
        one_thread(),
        clip_training(
            work / "clip", images, names, captions, recipe=recipe, report=report
        ) as finish_clip,
    ):
        with _timed(seconds, "autoencoder"):
            vae = autoencoder(work / "vae.safetensors", images, recipe, report)
        with _timed(seconds, "denoiser"):
            pipeline = train_pipeline(
                images,
                captions,
                vae=vae,
                tokenizer=tokenizer,
                recipe=recipe,
                report=report,
                state=work / "denoiser.state.safetensors",
            )
        with _timed(seconds, "CLIP"):
            finish_clip()
    pipeline.to("cpu").save_pretrained(folder / "diffusion", safe_serialization=True)
    shutil.copytree(work / "clip", folder / "clip")
    cards = model_cards(names, recipe, digest=digest, images=len(images.pixels), size=images.size)
    for kind, card in zip(("diffusion", "clip"), cards, strict=True):
        (folder / kind / "README.md").write_text(card, encoding="utf-8")
    return seconds


def autoencoder(
    path: Path, images: TrainingImages, recipe: Recipe, report: Report
) -> AutoencoderKL:
    """Train an autoencoder and save its weights at the path, or load existing ones."""
    if path.is_file():
        vae = build_autoencoder(recipe, images.size)
        vae.load_state_dict(load_file(path))
        return nn.Module.to(vae.eval().requires_grad_(False), images.device)
    vae = train_autoencoder(images, recipe, report, state=path.with_name("vae.state.safetensors"))
    write_atomically(path, save({name: t.cpu() for name, t in vae.state_dict().items()}))
    return vae


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
    """Yield a function that trains CLIP, or waits for a process that trains it beside the block.

    A GPU, which one training fills, gets no process; if CLIP is trained already, it does nothing.
    """

    def train() -> None:
        with published(folder) as partial:
            train_clip(
                images, names, captions, recipe=recipe, report=report, state=state_of(folder)
            ).save(partial)

    if folder.is_dir():
        yield lambda: None
        return
    if recipe.clip.steps < MIN_STEPS_FOR_PROCESS or images.device.type != "cpu":
        yield train
        return
    command = [sys.executable, "-P", "-m", "semix.pipeline.standins.small_clip", str(folder)]
    request = {"class_names": names, "captions": captions, "recipe": asdict(recipe)}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None

        def wait() -> None:
            if status := process.wait():
                errors.seek(0)
                text = errors.read().strip()
                print_line(text, file=sys.stderr)
                last = (text.splitlines() or ["it gave no reason"])[-1]
                raise RuntimeError(f"training CLIP ended with exit status {status}: {last}")

        try:
            with process.stdin as pipe:
                pipe.write(json.dumps(request).encode() + b"\n")
                pipe.write(save({"pixels": images.pixels, "targets": images.targets}))
            yield wait
        finally:
            process.kill()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: such small work gains little from a second, and loses on a busy core.

    The weights then do not depend on the number of cores, either.
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


_DIFFUSION = """\
# A small Stable Diffusion model

A latent diffusion model in the format of a diffusers `StableDiffusionPipeline`: AutoencoderKL,
UNet2DConditionModel, CLIPTextModel with a tokenizer of its own, DDIMScheduler. It was trained from
scratch by semix. It holds **no weights of Stable Diffusion** or of any other model.

{facts}
- Training: autoencoder {recipe.autoencoder.steps} steps, then U-Net and text encoder together
  {recipe.denoiser.steps} steps, v-prediction, moving average of the weights
- Captions: {captions}; {recipe.dropped_captions:.0%} replaced by the empty one for guidance

It knows these classes at this size and nothing else. Its purpose is to run the whole of semix
without a download; for pictures worth looking at, name a real Stable Diffusion model instead.

```python
from diffusers import StableDiffusionPipeline

pipeline = StableDiffusionPipeline.from_pretrained("FOLDER", use_safetensors=True)
image = pipeline({example!r}, num_inference_steps=20, guidance_scale=2.0).images[0]
```
"""

_CLIP = """\
# A small CLIP model

A contrastive image and text model in the format of open_clip. It was trained from scratch by
semix. It holds **no weights of OpenAI's CLIP**, OpenCLIP or of any other model.

{facts}
- Training: {recipe.clip.steps} steps of {recipe.clip.batch_size} images, contrastive loss in which
  all pairs of one class match
- Captions: {captions}

It knows these classes at this size and nothing else. Its purpose is to run the whole of semix
without a download; for other pictures, name a real CLIP model instead.

```python
import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")
```
"""


def model_cards(
    class_names: Sequence[str], recipe: Recipe, *, digest: str, images: int, size: int
) -> tuple[str, str]:
    """README.md of the diffusion pipeline and of the CLIP model."""
    shown = [_one_line(name) for name in class_names[:10]]
    names = ", ".join(shown) + (", ..." if len(class_names) > len(shown) else "")
    facts = (
        f"- Data: {images} training images of {size} x {size} pixels in {len(class_names)} classes "
        f"({names})\n"
        f"- Digest of data, settings, code and library versions: `{digest}`"
    )
    fields = {
        "facts": facts,
        "recipe": recipe,
        "captions": ", ".join(f'"{template}"' for template in (*recipe.templates, PLACEHOLDER)),
        "example": prompts(recipe.templates[0], class_names)[0],
    }
    return _DIFFUSION.format(**fields), _CLIP.format(**fields)


def _one_line(name: str) -> str:
    return " ".join(name.split())
