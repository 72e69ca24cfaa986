"""Small models of one's own pictures, and a config that builds with them."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict
from semix.data.files import write_atomically
from semix.data.imagefolder import refuse_among_pictures
from semix.data.real import load_real
from semix.data.settings import Settings, load_settings, whole_path
from semix.data.splits import RealDataConfig
from semix.flows.build_steps import log_ignored_files
from semix.pipeline.config import EncoderConfig, GeneratorConfig
from semix.pipeline.standins import train_standins

BUILD = "build.yaml"
STEPS, GUIDANCE = 20, 2.0  # as in the quickstart, whose pictures are best with them
IMAGES, ALPHAS = 1000, 8  # to mix: as many at least
# Goes before the last line of the section `annotation`.
WHY_SCALE = """\
  # Gives the labels of series of these models about 0.85 of the entropy of even labels. `auto` may
  # make them nearly hard, for these models tell the classes of their own pictures apart with ease.
"""

log = logging.getLogger("semix.standins")


class _WithReal(Settings):
    """Any settings that name real data."""

    model_config = ConfigDict(extra="allow", frozen=True)

    real: RealDataConfig


def standins(where: str, out: Path, *, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train a small Stable Diffusion pipeline and a small CLIP model, or find them trained.

    They let the whole path be walked before weights or a GPU are at hand, and are worth no more.

    Args:
        where: a folder of CLASS/ pictures, or the path or URL of a config with a section `real`.
        out: gets the models, and build.yaml unless it has one.
    Returns:
        `diffusion`, `clip` and `config`, their paths; `seconds` of each training; `generated`,
        the share of generated pictures that a classifier of the real ones reads as intended, and
        `real`, the share of real test pictures that it reads right.
    Raises:
        InputError: no pictures, or some that the models cannot be trained on; a folder that
            cannot be written.
    """
    # These cost seconds, which a refusal need not.
    from semix.pipeline.standins.agreement import end_point_agreement
    from semix.pipeline.standins.softness import soft_scale

    folder = Path(where).expanduser()
    given = {"real": {"name": "imagefolder", "path": str(folder.absolute())}}
    settings = load_settings(_WithReal, given if folder.is_dir() else where, overrides).real
    refuse_among_pictures(settings.path, out)
    if settings.name == "imagefolder":
        log_ignored_files(settings)
    real = load_real(settings)
    models = train_standins(real, out)
    generator = {"model": whole_path(models.diffusion), "steps": STEPS, "guidance_scale": GUIDANCE}
    annotation = {"model": f"local-dir:{whole_path(models.clip)}"}
    small = load_settings(GeneratorConfig, generator)
    measured = end_point_agreement(small, real)
    config = out / BUILD
    if config.exists():
        log.info("%s is there and stays; the models are in %s", config, models.diffusion.parent)
    else:
        scale = soft_scale(small, EncoderConfig(model=annotation["model"]), real)
        pairs = math.comb(len(real.class_names), 2)
        values = {
            "real": settings.model_dump(mode="json", exclude_defaults=True),
            "generator": generator,
            "mixing": {"alphas": ALPHAS, "groups_per_pair": math.ceil(IMAGES / (ALPHAS * pairs))},
            "annotation": annotation,
        }
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        write_atomically(config, f"{text}{WHY_SCALE}  scale: {scale}\n".encode())
    return {
        "diffusion": generator["model"],
        "clip": annotation["model"],
        "config": str(config),
        "seconds": models.seconds,
        "generated": measured.generated,
        "real": measured.real,
    }
