"""The models that the CPU benchmarks run on."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from semix.data.real import load_real
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.splits import RealDataConfig
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan
from semix.pipeline.prototypes import prepare
from semix.pipeline.root import create_build
from semix.pipeline.shard import Models, load_models
from semix.pipeline.standins import StandIns, train_standins

STANDINS = Path(__file__).parents[1] / "build" / "standins"


@cache
def standins() -> StandIns:
    """The quickstart's small models, trained once and stored in STANDINS."""
    return train_standins(load_real(RealDataConfig(name="digits")), STANDINS)


def build_config(*overrides: str, models: StandIns | None = None) -> BuildConfig:
    """45 series of 8 alphas, 10 steps with guidance, in batches of 8 series."""
    models = models or standins()
    values: dict[str, Any] = {
        "real": {"name": "digits"},
        "generator": {"model": str(models.diffusion), "steps": 10, "guidance_scale": 2.0},
        "mixing": {"groups_per_pair": 1},
        "annotation": {"model": f"local-dir:{models.clip}"},
        "shards": {"groups_per_shard": 8, "groups_per_batch": 8},
    }
    return load_settings(BuildConfig, values, overrides)


def open_root(config: BuildConfig, folder: str | None = None) -> tuple[Root, BuildPlan, Models]:
    """A new root in `folder` or a temporary one, its plan, and the models that make its shards."""
    build = create_build(config, folder or tempfile.mkdtemp(prefix="semix-bench-"))
    models = load_models(build.plan, prepare(build, device="cpu"), device="cpu")
    return build.root, build.plan, models
