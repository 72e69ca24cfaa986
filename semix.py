"""All that a Python user calls, under one name; a name loads what it needs at its first use.

docs/python.md has them with examples.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calib.config import TrainConfig
    from calib.losses import build_loss, build_mixed_loss
    from calib.metrics import calibration_metrics, ood_metrics
    from calib.posthoc import fit_temperature
    from data.dataset import MixedDataset
    from data.errors import InputError
    from data.labels import sharpen, soft_labels
    from data.pinned import shard_urls
    from data.root import Root
    from data.settings import load_settings
    from data.stream import mixed_pipeline
    from flows.audit import audit
    from flows.build import build, extend, resume
    from flows.evaluate import evaluate
    from flows.failures import RunFailed
    from flows.relabel import relabel
    from flows.report import report
    from flows.study import study
    from flows.train import train
    from pipeline.annotate import class_prototypes, projection_weight, similarity_labels
    from pipeline.conditioning import interpolate
    from pipeline.config import BuildConfig
    from pipeline.noise import initial_noise
    from pipeline.plan import BuildPlan

__all__ = [
    "BuildConfig",
    "BuildPlan",
    "InputError",
    "MixedDataset",
    "Root",
    "RunFailed",
    "TrainConfig",
    "audit",
    "build",
    "build_loss",
    "build_mixed_loss",
    "calibration_metrics",
    "class_prototypes",
    "evaluate",
    "extend",
    "fit_temperature",
    "initial_noise",
    "interpolate",
    "load_settings",
    "mixed_pipeline",
    "ood_metrics",
    "projection_weight",
    "relabel",
    "report",
    "resume",
    "shard_urls",
    "sharpen",
    "similarity_labels",
    "soft_labels",
    "study",
    "train",
]

_HOMES = {
    "calib.config": "TrainConfig",
    "calib.losses": "build_loss build_mixed_loss",
    "calib.metrics": "calibration_metrics ood_metrics",
    "calib.posthoc": "fit_temperature",
    "data.dataset": "MixedDataset",
    "data.errors": "InputError",
    "data.labels": "sharpen soft_labels",
    "data.pinned": "shard_urls",
    "data.root": "Root",
    "data.settings": "load_settings",
    "data.stream": "mixed_pipeline",
    "flows.audit": "audit",
    "flows.build": "build extend resume",
    "flows.failures": "RunFailed",
    "flows.evaluate": "evaluate",
    "flows.relabel": "relabel",
    "flows.report": "report",
    "flows.study": "study",
    "flows.train": "train",
    "pipeline.annotate": "class_prototypes projection_weight similarity_labels",
    "pipeline.conditioning": "interpolate",
    "pipeline.config": "BuildConfig",
    "pipeline.noise": "initial_noise",
    "pipeline.plan": "BuildPlan",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            found = globals()[name] = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
