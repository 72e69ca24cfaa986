"""Measure trained classifiers: logits, a temperature from validation, `evaluation.json`."""

import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from calib.checkpoint import save_tensors
from calib.classifier import Stage, load_classifier
from calib.config import TrainConfig
from calib.metrics import calibration_metrics
from calib.posthoc import fit_temperature
from calib.run_folder import (
    CONFIG,
    EVALUATION,
    pinned_index,
    run_digest,
    seed_evaluation,
    seed_folder,
)
from calib.training_data import TrainingData, decode, open_data
from data.files import read_json, write_json
from data.settings import load_settings

SCHEMA = 1
CHUNK = 500  # images in one forward pass
LIBRARIES = ("torch", "accelerate", "safetensors", "numpy", "scikit-learn", "pydantic")

__all__ = ["evaluate_run", "evaluate_seed", "in_chunks", "load_classifier", "predict"]


def evaluate_run(run: Path, *, device: str = "cpu") -> dict[str, Any]:
    """Measure every seed of a trained run anew and write its `evaluation.json`.

    Raises:
        InputError: a seed or stage is not trained, or the data is not there any more.
    """
    config = load_settings(TrainConfig, read_json(run / CONFIG))
    data = open_data(config, pinned=pinned_index(run))
    for seed in config.seeds:
        path = seed_evaluation(run, seed)
        seconds = read_json(path)["seconds"] if path.is_file() else 0.0
        evaluate_seed(config, data, run, seed=seed, seconds=seconds, device=torch.device(device))
    return write_evaluation(config, data, run)


def evaluate_seed(
    config: TrainConfig,
    data: TrainingData,
    run: Path,
    *,
    seed: int,
    seconds: float,
    device: torch.device,
) -> None:
    """Measure the stages of one seed; writes their logits, then the seed's `evaluation.json`.

    Args:
        seconds: spent on training.
    """
    started = time.perf_counter()
    stages: list[Stage] = ["base"] if config.head is None else ["base", "head"]
    rows = [_evaluate_stage(data, run, seed=seed, stage=stage, device=device) for stage in stages]
    found = {
        "config": config.identity(),
        "digest": run_digest(config, data.record),
        "seconds": seconds + time.perf_counter() - started,
        "rows": rows,
    }
    write_json(seed_evaluation(run, seed), found)


def write_evaluation(config: TrainConfig, data: TrainingData, run: Path) -> dict[str, Any]:
    """Gather the seeds' evaluations in the run's `evaluation.json`, which is written last."""
    seeds = [read_json(seed_evaluation(run, seed)) for seed in config.seeds]
    evaluation = {
        "schema": SCHEMA,
        "name": config.name,
        "digest": run_digest(config, data.record),
        "seconds": sum(seed["seconds"] for seed in seeds),
        "versions": versions(),
        "rows": [row for seed in seeds for row in seed["rows"]],
    }
    write_json(run / EVALUATION, evaluation)
    return evaluation


def predict(classifier: nn.Module, images: Tensor, *, device: torch.device) -> Tensor:
    """Logits of uint8 [N, S, S, 3], float32 [N, K] on the CPU. Takes the module's mode as it is."""
    return in_chunks(classifier.to(device), images, device=device).cpu()


@torch.no_grad()
def in_chunks(
    function: Callable[[Tensor], Tensor], rows: Tensor, *, device: torch.device | None = None
) -> Tensor:
    """Apply a function without gradients to many rows, a part at a time."""
    return torch.cat([function(part.to(device or part.device)) for part in rows.split(CHUNK)])


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def _evaluate_stage(
    data: TrainingData, run: Path, *, seed: int, stage: Stage, device: torch.device
) -> dict[str, Any]:
    """A row of `evaluation.json`. The temperature is all that validation images decide."""
    path = seed_folder(run, seed) / f"logits-{stage}.safetensors"
    classifier = load_classifier(run, seed, stage)
    tensors = {}
    for name in ("validation", "test"):
        split = getattr(data.real, name)
        tensors[f"{name}_logits"] = predict(classifier, decode(split), device=device)
        tensors[f"{name}_targets"] = torch.from_numpy(split.targets)
    save_tensors(path, tensors)
    row = {"stage": stage, "seed": seed, "logits": path.relative_to(run).as_posix()}
    return {**row, **measure(load_file(path))}


def measure(found: dict[str, Tensor]) -> dict[str, Any]:
    """Temperature from validation, and the measures of the test logits without and with it.

    Args:
        found: validation_logits, validation_targets, test_logits, test_targets.
    """
    temperature = fit_temperature(found["validation_logits"], found["validation_targets"])
    logits, targets = found["test_logits"], found["test_targets"]
    return {
        "temperature": temperature,
        "plain": calibration_metrics(logits, targets).as_dict(),
        "scaled": calibration_metrics(logits / temperature, targets).as_dict(),
    }
