"""The Python interface of semix; a name is imported from its module when it is first used.

docs/python.md documents it with examples.
"""

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semix.calib.classifier import load_classifier
    from semix.calib.config import TrainConfig
    from semix.calib.losses import build_loss, build_mixed_loss
    from semix.calib.metrics import calibration_metrics, ood_metrics
    from semix.calib.results import results
    from semix.calib.temperature import fit_temperature
    from semix.data.dataset import MixedDataset
    from semix.data.errors import InputError
    from semix.data.labels import sharpen, soft_labels
    from semix.data.pinned import shard_urls
    from semix.data.root import Root
    from semix.data.settings import load_settings
    from semix.data.stream import mixed_pipeline
    from semix.flows.audit import audit
    from semix.flows.build import build, extend, extend_by_run, resume
    from semix.flows.evaluate import evaluate
    from semix.flows.failures import RunFailed
    from semix.flows.loop import loop
    from semix.flows.relabel import relabel
    from semix.flows.report import report
    from semix.flows.study import study
    from semix.flows.train import train
    from semix.pipeline.annotate import class_prototypes, projection_weight, similarity_labels
    from semix.pipeline.conditioning import interpolate
    from semix.pipeline.config import BuildConfig
    from semix.pipeline.noise import initial_noise
    from semix.pipeline.plan import BuildPlan

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
    "extend_by_run",
    "fit_temperature",
    "initial_noise",
    "interpolate",
    "load_classifier",
    "load_settings",
    "loop",
    "mixed_pipeline",
    "ood_metrics",
    "projection_weight",
    "relabel",
    "report",
    "results",
    "resume",
    "shard_urls",
    "sharpen",
    "similarity_labels",
    "soft_labels",
    "study",
    "train",
]

_MODULES = {
    "semix.calib.classifier": "load_classifier",
    "semix.calib.config": "TrainConfig",
    "semix.calib.losses": "build_loss build_mixed_loss",
    "semix.calib.metrics": "calibration_metrics ood_metrics",
    "semix.calib.results": "results",
    "semix.calib.temperature": "fit_temperature",
    "semix.data.dataset": "MixedDataset",
    "semix.data.errors": "InputError",
    "semix.data.labels": "sharpen soft_labels",
    "semix.data.pinned": "shard_urls",
    "semix.data.root": "Root",
    "semix.data.settings": "load_settings",
    "semix.data.stream": "mixed_pipeline",
    "semix.flows.audit": "audit",
    "semix.flows.build": "build extend extend_by_run resume",
    "semix.flows.failures": "RunFailed",
    "semix.flows.loop": "loop",
    "semix.flows.evaluate": "evaluate",
    "semix.flows.relabel": "relabel",
    "semix.flows.report": "report",
    "semix.flows.study": "study",
    "semix.flows.train": "train",
    "semix.pipeline.annotate": "class_prototypes projection_weight similarity_labels",
    "semix.pipeline.conditioning": "interpolate",
    "semix.pipeline.config": "BuildConfig",
    "semix.pipeline.noise": "initial_noise",
    "semix.pipeline.plan": "BuildPlan",
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _check_distributions() -> None:
    """Raises ImportError if another distribution `semix` is installed, which has the same files."""
    for folder in filter(None, sys.path):
        with suppress(OSError):
            for installed in Path(folder).glob("semix-*.dist-info"):
                raise ImportError(
                    f"{installed}: the distribution `semix` is another package of the same import "
                    "name, or an earlier version of this one; run `pip uninstall semix`, then "
                    "install semix-calibration again"
                )


_check_distributions()
