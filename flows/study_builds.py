"""The mixed datasets that a study builds: one per build, split and draw."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from semix.calib.study import Cell, StudyConfig, error_prefix, merged
from semix.calib.study_mixed import MIXED_CSV
from semix.calib.tables import csv_text
from semix.data.files import write_atomically
from semix.data.formats import PLAN
from semix.data.real import load_real
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.splits import RealDataConfig
from semix.flows.series_by_run import start_build
from semix.pipeline.config import BuildConfig
from semix.pipeline.standins import RECIPES, StandIns, train_standins

MODELS = "models"  # below a study's folder
LOCAL = "local-dir:"  # open_clip's prefix of a folder


@dataclass(frozen=True)
class MixedPlan:
    """One mixed dataset of a study.

    Attributes:
        url: URL of its root.
        settings: settings of its build, without models if the study trains them.
        real: real images of the runs that train on it.
        axes: dataset, build, split and draw.
    """

    url: str
    settings: dict[str, Any]
    real: RealDataConfig
    axes: Mapping[str, object]

    def config(self, models: StandIns | None) -> BuildConfig:
        """The config of the build. Raises InputError for settings that no build accepts."""
        values = self.settings
        if models is not None:
            values = merged(values, model_settings(models))
        return load_settings(BuildConfig, values)


def model_settings(models: StandIns) -> dict[str, str]:
    """Settings of a build that take these models."""
    return {
        "generator.model": str(models.diffusion.absolute()),
        "annotation.model": f"{LOCAL}{models.clip.absolute()}",
    }


def mixed_plans(study: StudyConfig, cells: Sequence[Cell]) -> list[MixedPlan]:
    """The mixed datasets that these cells need, each once, in their order.

    Raises:
        InputError: settings that no build accepts; names the build.
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
    if study.standins:  # filled in when the models are trained
        values = merged(values, {"generator.model": "", "annotation.model": ""})
    axes = {
        "dataset": cell.dataset,
        "build": cell.build,
        "split": cell.split,
        "draw": cell.draw,
    }
    plan = MixedPlan(url, values, cell.config.real, axes)
    with error_prefix(f"builds.{cell.build}"):
        plan.config(None)
    return plan


def models_for(
    plan: MixedPlan, plans: Iterable[MixedPlan], study: StudyConfig, out: Path, *, device: str
) -> StandIns | None:
    """The models of a mixed dataset, trained if necessary; None if its build names them.

    Args:
        plans: all plans of the study. If the build of another plan with the same real images has
            begun, its models are used, even those of another version of semix.
        device: where large models are trained.
    """
    if not study.standins:
        return None
    for other_plan in (p for p in plans if p.real == plan.real):
        if models := _stored_models(other_plan):
            return models
    if study.standins is True:
        return train_standins(load_real(plan.real), out / MODELS)
    recipe = RECIPES[study.standins](image_size=plan.real.image_size)
    return train_standins(load_real(plan.real), out / MODELS, recipe=recipe, device=device)


def _stored_models(plan: MixedPlan) -> StandIns | None:
    path = _settings_file(plan)
    if not path.is_file():
        return None
    values = yaml.safe_load(path.read_bytes())
    encoder = values.get("annotation", {}).get("model", "")
    diffusion, clip = Path(values["generator"]["model"]), Path(encoder.removeprefix(LOCAL))
    usable = encoder.startswith(LOCAL) and diffusion.is_dir() and clip.is_dir()
    return StandIns(diffusion, clip, {}) if usable else None


def _settings_file(plan: MixedPlan) -> Path:
    return Path(f"{plan.url}.yaml")


def open_mixed_root(plan: MixedPlan, models: StandIns | None) -> tuple[Root, Path]:
    """The root of a mixed dataset, created if it is new, and the file of its settings beside it.

    Raises:
        InputError: the root was created with other settings.
    """
    config = plan.config(models)
    path = _settings_file(plan)
    values = config.model_dump(mode="json", exclude_defaults=True)
    root = start_build(config, plan.url).root
    write_atomically(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())
    return root, path


def is_built(plan: MixedPlan) -> bool:
    """Whether every shard is committed and there is an index, whatever the settings."""
    if not (Path(plan.url) / PLAN).is_file():
        return False
    root = Root(plan.url)
    return bool(root.indices()) and not root.missing()


def quality_metrics(root: Root) -> dict[str, float | int | None]:
    """Quality metrics of a mixed dataset.

    Returns:
        Number of images; mean stability of the selected noises, and of all candidates; diversity of
        the CLIP features; the fraction of unmixed images whose features are nearest to their own
        class; and the Spearman correlation of alpha and weight, averaged over series.
    """
    import torch

    from semix.data.pinned import PinnedRoot
    from semix.data.quality import (  # imports torch, which a failed check need not wait for
        diversity,
        end_points,
        endpoint_agreement,
        prototype_distances,
        series_quality,
    )

    source = PinnedRoot(root)
    shards = [(list(source.samples(shard)), source.features(shard)) for shard in source.shards]
    records = [sample.record for samples, _ in shards for sample in samples]
    features = torch.cat([shard_features for _, shard_features in shards])  # [G, A, D]
    classes = torch.tensor([record.classes for record in records])
    group, position, intended = end_points(torch.tensor([r.mixtures for r in records]), classes)
    nearest = prototype_distances(features[group, position], source.prototypes).argmin(-1)
    alphas, weights = (
        torch.tensor([getattr(r, name) for r in records]) for name in ("alphas", "weights")
    )
    candidate_scores = [score for record in records for score in record.noise.get("scores", [])]
    return {
        "images": alphas.numel(),
        "stability": _mean([record.stability for record in records]),
        "candidates_stability": _mean(candidate_scores),
        "diversity": diversity(features, classes),
        "end_points": endpoint_agreement(nearest, intended)["share"],
        "spearman": series_quality(alphas, weights).mean,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def write_mixed_csv(plans: Sequence[MixedPlan], out: Path) -> None:
    """Write mixed.csv, one line per mixed dataset, which the study's tables show."""
    from pandas import DataFrame

    lines = [{**plan.axes, **quality_metrics(Root(plan.url))} for plan in plans]
    write_atomically(out / MIXED_CSV, csv_text(DataFrame(lines)).encode())
