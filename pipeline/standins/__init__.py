"""Small genuine Stable Diffusion and CLIP models, trained here on any labelled images."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from semix.data.errors import InputError
from semix.data.files import published, remove_tree, require_no_link
from semix.data.fingerprint import file_digest, fingerprint
from semix.data.splits import RealDataset
from semix.pipeline.standins.recipe import (
    Recipe,
    Report,
    TrainingStage,
    large_recipe,
    medium_recipe,
    recipe_for,
    shown_progress,
    tiny_recipe,
)

__all__ = [
    "RECIPES",
    "Recipe",
    "StandIns",
    "TrainingStage",
    "find_standins",
    "large_recipe",
    "medium_recipe",
    "recipe_for",
    "standins_digest",
    "tiny_recipe",
    "train_standins",
]

RECIPES = {"tiny": tiny_recipe, "medium": medium_recipe, "large": large_recipe}  # by size
LIBRARIES = ("torch", "diffusers", "transformers", "open_clip_torch")


@dataclass(frozen=True)
class StandIns:
    """Folders of the trained models."""

    diffusion: Path  # a diffusers StableDiffusionPipeline directory
    clip: Path  # an open_clip model: "local-dir:" before this path
    seconds: dict[str, float]  # of each training; empty if the models were trained before


def train_standins(
    real: RealDataset,
    folder: Path,
    *,
    recipe: Recipe | None = None,
    progress: Report | None = None,
    device: str = "cpu",
) -> StandIns:
    """Train both models on the training split, or reuse those trained before on the same images.

    They appear as `folder/DIGEST12/diffusion` and `folder/DIGEST12/clip`, both at once and
    complete; until then `folder/DIGEST12.begun` holds each finished network and the state of those
    that are being trained. On one kind of machine the same digest gives the same weights.

    Args:
        recipe: None takes `recipe_for` the data.
        device: on which they are trained.
        progress: called with (stage, steps done, steps in all); None shows them on stderr.
    Raises:
        InputError: data that the models cannot be trained on; a folder that cannot be written.
    """
    size = check_suitable(real)
    recipe = recipe or recipe_for(num_images=len(real.train), image_size=size)
    digest = standins_digest(real, recipe)
    final = folder / digest[:12]
    seconds: dict[str, float] = {}
    if not final.is_dir():
        _make_folder(folder)
        work = final.with_name(f"{final.name}.begun")
        require_no_link("folder", work)
        # diffusers and open_clip take seconds to import, and are needed only for training
        from semix.pipeline.standins.two_models import train_both

        reporting = nullcontext(progress) if progress else shown_progress()
        with published(final) as partial, reporting as report:
            seconds = train_both(
                real, partial, recipe=recipe, digest=digest, report=report, work=work, device=device
            )
        remove_tree(work)
    return StandIns(final / "diffusion", final / "clip", seconds)


def find_standins(real: RealDataset, folder: Path) -> StandIns | None:
    """Models of the default recipe that were trained before on the same images, or None."""
    recipe = recipe_for(num_images=len(real.train), image_size=check_suitable(real))
    final = folder / standins_digest(real, recipe)[:12]
    return StandIns(final / "diffusion", final / "clip", {}) if final.is_dir() else None


def standins_digest(real: RealDataset, recipe: Recipe) -> str:
    """Digest of everything that decides the weights, except the machine."""
    package = Path(__file__).parent
    sources = [*sorted(package.glob("*.py")), package.parent / "prompts.py"]  # wording of prompts
    return fingerprint(
        {
            "train": real.train.digest,
            "class_names": list(real.class_names),
            "recipe": asdict(recipe),
            "code": {source.name: file_digest(source) for source in sources},
            "libraries": {name: version(name) for name in LIBRARIES},
        }
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("folder", folder, f"cannot be made: {error.strerror}") from error


MIN_SIDE = 16  # pixels
MIN_PER_CLASS = 2


def check_suitable(real: RealDataset) -> int:
    """Refuse data that the small models cannot be trained on; return the images' side in pixels.

    Raises:
        InputError: fewer than two classes, a class with fewer than two training images, a side
            below 16 or no multiple of 8.
    """
    classes = len(real.class_names)
    if classes < 2:
        raise InputError("class_names", list(real.class_names), "mixing needs at least two classes")
    counts = np.bincount(real.train.targets, minlength=classes)
    if len(counts) > classes:
        raise InputError("train", f"class {len(counts) - 1}", f"there are {classes} class names")
    smallest = int(counts.argmin())
    if counts[smallest] < MIN_PER_CLASS:
        name = real.class_names[smallest]
        remedy = f"class {name!r} needs at least {MIN_PER_CLASS} to learn from"
        raise InputError("train", f"{counts[smallest]} images", remedy)
    side = real.train.images([0]).shape[1]
    if side < MIN_SIDE or side % 8:
        remedy = f"choose a multiple of 8, at least {MIN_SIDE}"
        raise InputError("real.image_size", side, remedy)
    return int(side)
