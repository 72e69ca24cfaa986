"""Small genuine Stable Diffusion and CLIP models, trained here on any labelled images."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from data.errors import InputError
from data.fingerprint import file_digest, fingerprint
from data.real import RealDataset
from pipeline.standins.progress import Report, shown_progress
from pipeline.standins.publishing import published
from pipeline.standins.recipe import Recipe, Stage, recipe_for
from pipeline.standins.suitability import check_suitable

__all__ = [
    "Recipe",
    "Stage",
    "StandIns",
    "find_standins",
    "recipe_for",
    "standins_digest",
    "train_standins",
]

LIBRARIES = ("torch", "diffusers", "transformers", "open_clip_torch")


@dataclass(frozen=True)
class StandIns:
    """Where the trained models are."""

    diffusion: Path  # a diffusers StableDiffusionPipeline directory
    clip: Path  # an open_clip model: "local-dir:" before this path
    seconds: dict[str, float]  # that each training took just now; empty if they were found


def train_standins(
    real: RealDataset,
    folder: Path,
    *,
    recipe: Recipe | None = None,
    progress: Report | None = None,
) -> StandIns:
    """Train both models on the training split, or find those trained before on the same.

    They appear as `folder/DIGEST12/diffusion` and `folder/DIGEST12/clip`, both at once and
    complete. On one kind of machine the same digest gives the same weights.

    Args:
        recipe: None takes `recipe_for` the data.
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
        _make(folder)
        # diffusers and open_clip take seconds to import, which finding models need not cost
        from pipeline.standins.train import train_both

        shown = nullcontext(progress) if progress else shown_progress()
        with published(final) as partial, shown as report:
            seconds = train_both(real, partial, recipe=recipe, digest=digest, report=report)
    return StandIns(final / "diffusion", final / "clip", seconds)


def find_standins(real: RealDataset, folder: Path) -> StandIns | None:
    """Models of the default recipe that were trained before on the same images."""
    recipe = recipe_for(num_images=len(real.train), image_size=check_suitable(real))
    final = folder / standins_digest(real, recipe)[:12]
    return StandIns(final / "diffusion", final / "clip", {}) if final.is_dir() else None


def standins_digest(real: RealDataset, recipe: Recipe) -> str:
    """Digest of everything that decides the weights, but for the machine."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), here.parent / "prompts.py"]  # the prompts' wording
    return fingerprint(
        {
            "train": real.train.digest,
            "class_names": list(real.class_names),
            "recipe": asdict(recipe),
            "code": {source.name: file_digest(source) for source in sources},
            "libraries": {name: version(name) for name in LIBRARIES},
        }
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("folder", folder, f"cannot be made: {error.strerror}") from error
