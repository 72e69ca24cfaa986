"""Train small models on your images, and write a config that builds with them."""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict

from semix.data.files import write_atomically
from semix.data.imagefolder import check_outside_images
from semix.data.real import load_real
from semix.data.settings import Settings, load_settings, whole_path
from semix.data.splits import RealDataConfig
from semix.flows.build_steps import log_ignored_files
from semix.pipeline.config import EncoderConfig, GeneratorConfig
from semix.pipeline.standins import RECIPES, train_standins

BUILD, SMALL = "build.yaml", "small"
STEPS, GUIDANCE = 20, 2.0  # as in the quickstart, whose images look best with these values
IMAGES, ALPHAS = 1000, 8  # least number of mixed images; alphas per series
# The file has it before the last line of its section `annotation`.
SCALE_COMMENT = """\
  # Gives labels of these models' images about 0.85 of the entropy of even labels. `auto` may make
  # them nearly hard, as the models separate the classes of their training images with ease.
"""

log = logging.getLogger("semix.standins")


class _RealSettings(Settings):
    """Any settings that name real data."""

    model_config = ConfigDict(extra="allow", frozen=True)

    real: RealDataConfig


def standins(
    where: str, out: Path, *, size: str = SMALL, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Train a small Stable Diffusion pipeline and a small CLIP model, unless they are trained.

    They serve to try every step without large models or a GPU, and for nothing else.

    Args:
        where: a folder of CLASS/ folders, or the path or URL of a config with a section `real`.
        out: folder for the models, and for build.yaml unless it exists.
        size: small, of minutes; or one of `RECIPES`.
    Returns:
        `diffusion`, `clip` and `config`, their paths; `seconds` per training; `quality` by class:
        see `semix.pipeline.standins.quality.ClassQuality`.
    Raises:
        InputError: no images, or images that the models cannot be trained on; a folder that
            cannot be written.
    """
    # Their import takes seconds, so it comes after cheap checks.
    from semix.pipeline.standins.quality import end_point_quality
    from semix.pipeline.standins.softness import soft_scale

    folder = Path(where).expanduser()
    section = {"real": {"name": "imagefolder", "path": str(folder.absolute())}}
    settings = load_settings(_RealSettings, section if folder.is_dir() else where, overrides).real
    check_outside_images(settings.folder, out)
    if settings.name == "imagefolder":
        log_ignored_files(settings)
    real = load_real(settings)
    recipe = RECIPES[size](image_size=settings.image_size) if size != SMALL else None
    models = train_standins(real, out, recipe=recipe)
    generator = {"model": whole_path(models.diffusion), "steps": STEPS, "guidance_scale": GUIDANCE}
    annotation = {"model": f"local-dir:{whole_path(models.clip)}"}
    generator_config = load_settings(GeneratorConfig, generator)
    clip = EncoderConfig(model=annotation["model"])
    quality = end_point_quality(generator_config, clip, real)
    config = out / BUILD
    if config.exists():
        log.info("%s exists and stays; the models are in %s", config, models.diffusion.parent)
    else:
        scale = soft_scale(generator_config, clip, real)
        pairs = math.comb(len(real.class_names), 2)
        values = {
            "real": settings.model_dump(mode="json", exclude_defaults=True),
            "generator": generator,
            "mixing": {"alphas": ALPHAS, "groups_per_pair": math.ceil(IMAGES / (ALPHAS * pairs))},
            "annotation": annotation,
        }
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        write_atomically(config, f"{text}{SCALE_COMMENT}  scale: {scale}\n".encode())
    return {
        "diffusion": generator["model"],
        "clip": annotation["model"],
        "config": str(config),
        "seconds": models.seconds,
        "quality": {name: asdict(each) for name, each in quality.items()},
    }
