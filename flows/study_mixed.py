"""The mixed datasets that a study makes: one of each build, split and draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calib.study import Cell, StudyConfig, merged, naming
from data.files import write_atomically
from data.root import Root
from data.settings import load_settings
from data.splits import RealDataConfig
from pipeline.config import BuildConfig
from pipeline.root import create_root
from pipeline.standins import StandIns

MODELS = "models"  # below a study's folder


@dataclass(frozen=True)
class MixedPlan:
    """One mixed dataset of a study.

    Attributes:
        url: of its root.
        settings: of its build; where the study trains models, without those.
        real: the images of the runs that train on it.
    """

    url: str
    settings: dict[str, Any]
    real: RealDataConfig

    def config(self, models: StandIns | None) -> BuildConfig:
        """Raises InputError for settings that no build takes."""
        values = self.settings
        if models is not None:
            given = {
                "generator.model": str(models.diffusion.absolute()),
                "annotation.model": f"local-dir:{models.clip.absolute()}",
            }
            values = merged(values, given)
        return load_settings(BuildConfig, values)


def mixed_plans(study: StudyConfig, cells: Sequence[Cell]) -> list[MixedPlan]:
    """What these cells need, each once, in their order.

    Raises:
        InputError: settings that no build takes; names the build.
    """
    plans: dict[str, MixedPlan] = {}
    for cell in cells:
        if cell.build is not None and cell.config.mixed is not None:
            url = cell.config.mixed.url
            plans.setdefault(url, _plan(study, cell, url))
    return list(plans.values())


def _plan(study: StudyConfig, cell: Cell, url: str) -> MixedPlan:
    assert cell.build is not None
    values = merged(study.builds[cell.build], {"real": cell.config.real.model_dump(mode="json")})
    if cell.draw is not None:
        values = merged(values, {"mixing.seed": cell.draw})
    if study.standins:  # named when they are trained
        values = merged(values, {"generator.model": "", "annotation.model": ""})
    plan = MixedPlan(url, values, cell.config.real)
    with naming(f"builds.{cell.build}"):
        plan.config(None)
    return plan


def begun(plan: MixedPlan, models: StandIns | None) -> tuple[Root, Path]:
    """Its root, which is planned where it is new, and the file of its build's settings beside it.

    Raises:
        InputError: the root was begun with other settings.
    """
    config = plan.config(models)
    path = Path(f"{plan.url}.yaml")
    values = config.model_dump(mode="json", exclude_defaults=True)
    root = create_root(config, plan.url)
    write_atomically(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())
    return root, path


def is_made(root: Root) -> bool:
    return bool(root.indices()) and not root.missing()
