"""Measure trained classifiers: logits, what validation decides, then `evaluation.json`."""

import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calib.classifier import load_classifier
from calib.config import TrainConfig
from calib.evaluation.checks import check_evaluation
from calib.evaluation.measures import KINDS, measure
from calib.evaluation.predicting import in_chunks, predict
from calib.evaluation.rows import rows_of
from calib.evaluation.trained import TrainedSeed
from calib.run_folder import (
    CONFIG,
    DATA,
    EVALUATION,
    SCHEMA,
    pinned_index,
    run_digest,
    seed_evaluation,
)
from calib.training_data import TrainingData, open_data
from data.files import read_json, write_json
from data.settings import load_settings

if TYPE_CHECKING:
    from accelerate import Accelerator

LIBRARIES = ("torch", "accelerate", "safetensors", "numpy", "scipy", "scikit-learn", "pydantic")

__all__ = [
    "KINDS",
    "evaluate_run",
    "evaluate_seed",
    "in_chunks",
    "load_classifier",
    "measure",
    "measure_again",
    "predict",
    "write_evaluation",
]


def evaluate_run(run: Path, *, device: str = "cpu", fresh: bool = False) -> dict[str, Any]:
    """Measure every seed of a trained run anew and write its `evaluation.json`.

    Stored logits are taken where they came from the weights at hand, and so are figures under
    shift and for foreign images if their settings are the same; other bins or resamples then run
    no network.

    Args:
        fresh: run the networks whatever is stored.
    Raises:
        InputError: a seed or stage is not trained, the data is not there any more, or the
            settings under `evaluation` cannot be measured.
    """
    config = load_settings(TrainConfig, read_json(run / CONFIG))
    weights = read_json(run / DATA).get("weights")
    data = open_data(config, pinned=pinned_index(run), weights=weights, compare_splits=False)
    place = torch.device(device)
    for seed in config.seeds:
        measure_again(config, data, run, seed=seed, device=place, fresh=fresh)
    return write_evaluation(config, data, run)


def evaluate_seed(
    config: TrainConfig,
    data: TrainingData,
    run: Path,
    *,
    seed: int,
    seconds: float,
    device: torch.device,
    accelerator: "Accelerator | None" = None,
    fresh: bool = False,
) -> None:
    """Measure the stages of one seed; writes their logits, then the seed's `evaluation.json`.

    Args:
        seconds: spent on training.
        accelerator: shares the predictions out among its processes, which must all call; the
            main one measures and writes. Without it, the one process that calls does all.
        fresh: as for `evaluate_run`.
    Raises:
        InputError: settings that cannot be measured, or a classifier that gives NaN.
    """
    started = time.perf_counter()
    names, size = data.real.class_names, config.real.image_size
    check_evaluation(config.evaluation, names, image_size=size)
    trained = TrainedSeed(config, data, run, seed, device, accelerator)
    rows = rows_of(trained, fresh=fresh)
    if trained.is_main:
        found = {
            "schema": SCHEMA,
            "config": config.identity(),
            "evaluation": config.evaluation.model_dump(mode="json"),
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
        "evaluation": config.evaluation.model_dump(mode="json"),
        "seconds": sum(seed["seconds"] for seed in seeds),
        "versions": versions(),
        "rows": [row for seed in seeds for row in seed["rows"]],
    }
    write_json(run / EVALUATION, evaluation)
    return evaluation


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def measure_again(
    config: TrainConfig,
    data: TrainingData,
    run: Path,
    *,
    seed: int,
    device: torch.device,
    accelerator: "Accelerator | None" = None,
    fresh: bool = False,
) -> None:
    """As `evaluate_seed`, of a seed that may have been measured: its seconds are kept."""
    path = seed_evaluation(run, seed)
    seconds = read_json(path)["seconds"] if path.is_file() else 0.0
    evaluate_seed(
        config,
        data,
        run,
        seed=seed,
        seconds=seconds,
        device=device,
        accelerator=accelerator,
        fresh=fresh,
    )
