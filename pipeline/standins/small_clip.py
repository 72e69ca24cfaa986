"""Train a small open_clip model: an image tower and a text tower.

`python -m semix.pipeline.standins.small_clip FOLDER` trains one on data from standard input.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from open_clip import CLIP
from open_clip.tokenizer import get_clean_fn
from pydantic import TypeAdapter
from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import CLIPTokenizer

from semix.data.files import published
from semix.pipeline.standins.fitting import Batches, TrainingImages, fit, seeded
from semix.pipeline.standins.recipe import Recipe, Report
from semix.pipeline.standins.text import Captions, build_tokenizer, tokenise


@dataclass(frozen=True)
class SmallClip:
    """A trained model, with the tokenizer and config that open_clip needs to load it."""

    model: CLIP
    tokenizer: CLIPTokenizer
    config: dict[str, Any]  # open_clip_config.json

    def save(self, folder: Path) -> None:
        """Write a folder for `open_clip.create_model_and_transforms("local-dir:FOLDER")`."""
        folder.mkdir(parents=True)
        self.tokenizer.save_pretrained(folder)
        weights = {name: t.cpu().contiguous() for name, t in self.model.state_dict().items()}
        save_file(weights, folder / "open_clip_model.safetensors")
        (folder / "open_clip_config.json").write_text(json.dumps(self.config, indent=2) + "\n")


def train_clip(
    images: TrainingImages,
    class_names: tuple[str, ...],
    captions: Captions,
    *,
    recipe: Recipe,
    report: Report = lambda *_: None,
    state: Path | None = None,
) -> SmallClip:
    """Train on images [N,3,S,S] in [-1, 1] and the captions [K][T] of their classes."""
    tokenizer, cleaned = clip_tokenizer(class_names, captions)
    caption_ids = torch.stack([tokenise(tokenizer, texts) for texts in cleaned])  # [K,T,L]
    mean, std = _pixel_moments(images.pixels)
    config = _config(recipe, tokenizer, image_size=images.size, mean=mean, std=std)
    with seeded(recipe.seed):
        model = CLIP(**config["model_cfg"]).to(images.device)
        nn.init.normal_(model.token_embedding.weight, std=1.0)  # as in the pipeline's text encoder
    rng = torch.Generator().manual_seed(recipe.seed)
    draw = Batches(len(images.pixels), recipe.clip.batch_size, rng=rng)
    inputs = ((images.pixels + 1) / 2 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)

    def loss() -> Tensor:
        rows = next(draw)
        template = torch.randint(caption_ids.shape[1], (len(rows),), generator=rng)
        pixels = shifted(inputs[rows], max_shift=images.size // 16, rng=rng)
        image_features = model.encode_image(pixels, normalize=True)
        texts = caption_ids[images.targets[rows], template].to(images.device)
        text_features = model.encode_text(texts, normalize=True)
        logits = model.logit_scale.exp().clamp(max=100) * image_features @ text_features.T
        return contrastive_loss(logits, images.targets[rows].to(images.device))

    stage = recipe.clip
    decay = recipe.average_decay
    for step in fit([model], loss, stage=stage, average_decay=decay, draw=draw, state=state):
        report("CLIP", step, stage.steps)
    return SmallClip(model, tokenizer, config)


def clip_tokenizer(
    class_names: tuple[str, ...], captions: Captions
) -> tuple[CLIPTokenizer, list[list[str]]]:
    """A tokenizer, and the captions [K][T] after open_clip's cleaning.

    Raises:
        InputError: two class names that are equal after cleaning.
    """
    clean = get_clean_fn("whitespace")
    cleaned = [[clean(text) for text in texts] for texts in captions]
    return build_tokenizer(class_names, cleaned), cleaned


def contrastive_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Contrastive loss in which all pairs of one class match, not only the diagonal.

    Args:
        logits: scaled similarities of images (rows) and texts (columns), [B,B].
        targets: class of each image and of its text, int64 [B].
    Source: Yang et al. 2022 (UniCL), eq. 2 to 4.
    """
    match = (targets[:, None] == targets[None, :]).float()
    match = match / match.sum(dim=1, keepdim=True)  # symmetric classes: rows and columns alike
    return (F.cross_entropy(logits, match) + F.cross_entropy(logits.T, match)) / 2


def shifted(pixels: Tensor, *, max_shift: int, rng: torch.Generator) -> Tensor:
    """Shift each image [B,C,S,S] by up to `most` pixels; the border is repeated."""
    size = pixels.shape[-1]
    padded = F.pad(pixels, (max_shift,) * 4, mode="replicate")
    offsets = torch.randint(2 * max_shift + 1, (len(pixels), 2), generator=rng).tolist()
    pairs = zip(padded, offsets, strict=True)
    return torch.stack([image[:, y : y + size, x : x + size] for image, (y, x) in pairs])


def _pixel_moments(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel on the scale of [0, 1], both [3]."""
    unit = (pixels + 1) / 2
    # a constant channel has deviation 0
    return unit.mean(dim=(0, 2, 3)), unit.std(dim=(0, 2, 3)).clamp(min=0.01)


def _config(
    recipe: Recipe, tokenizer: CLIPTokenizer, *, image_size: int, mean: Tensor, std: Tensor
) -> dict[str, Any]:
    """The content of open_clip_config.json."""
    vision = {
        "image_size": image_size,
        "patch_size": image_size // recipe.clip_grid,
        "layers": recipe.clip_layers,
        "width": recipe.clip_width,
        "head_width": 16,
    }
    text = {
        "context_length": tokenizer.model_max_length,
        "vocab_size": len(tokenizer),
        "hf_tokenizer_name": "CLIPTokenizer",  # any name: open_clip reads the files beside it
        "width": recipe.text_width,
        "heads": recipe.text_width // 16,
        "layers": recipe.text_layers,
    }
    return {
        "model_cfg": {
            "embed_dim": recipe.clip_features,
            "vision_cfg": vision,
            "text_cfg": text,
        },
        "preprocess_cfg": {"mean": mean.tolist(), "std": std.tolist()},
    }


def state_of(folder: Path) -> Path:
    """The file with the state of the training that will write this folder."""
    return folder.with_name(f"{folder.name}.state.safetensors")


def main(folder: Path) -> None:
    """Train on a line of JSON and images as safetensors from standard input, and save the model."""
    torch.set_num_threads(1)  # like the other trainings
    request = json.loads(sys.stdin.buffer.readline())
    images = TrainingImages(**load(sys.stdin.buffer.read()))
    recipe = TypeAdapter(Recipe).validate_python(request["recipe"])
    with published(folder) as partial:
        names, captions = tuple(request["class_names"]), request["captions"]
        train_clip(images, names, captions, recipe=recipe, state=state_of(folder)).save(partial)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
