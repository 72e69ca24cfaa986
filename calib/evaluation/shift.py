"""Test images under common corruptions: made a chunk at a time, measured, forgotten."""

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from calib.classifier import Stage
from calib.config.evaluation import ShiftConfig
from calib.evaluation.checks import MEAN, corruption_names
from calib.evaluation.trained import TrainedSeed
from calib.metrics import calibration_metrics
from data.corruptions import corrupt
from data.fingerprint import derived_seed

SEED = 0  # the same corrupted images for every run, so that runs can be compared
MEASURES = ("accuracy", "ece", "adaptive_ece", "classwise_ece", "nll", "brier")
AFTER_SCALING = ("ece", "nll")  # once more with the temperature of the clean validation images
Cells = dict[str, Any]


def measure_shift(
    trained: TrainedSeed, config: ShiftConfig, temperatures: Mapping[Stage, float]
) -> dict[Stage, Cells]:
    """The measures of each stage under every corruption and severity.

    Args:
        temperatures: of each stage; in the main process, the others have none to measure.
    Returns:
        For each stage {"bins", "images", "mean": {measure: value}, "corruptions": {name: {"mean":
        {...}, "1": {...}, ...}}}; measures after temperature scaling begin with `scaled_`.
    """
    images, targets = chosen_images(trained, config)
    cells: dict[Stage, dict[str, Cells]] = {stage: {} for stage in trained.stages}
    for name in corruption_names(config):
        for severity in config.severities:

            def load(start: int, stop: int, name: str = name, severity: int = severity) -> Tensor:
                part = images[start:stop].numpy()
                return torch.from_numpy(corrupt(part, name, severity, seed=SEED, first=start))

            found = trained.predict(load, len(images), what=f"{name} {severity}")
            for stage, temperature in temperatures.items():
                cell = _cell(found[stage], targets, temperature, config.bins)
                cells[stage].setdefault(name, {})[str(severity)] = cell
    return {
        stage: {"bins": config.bins, "images": len(images), **_with_means(cells[stage])}
        for stage in temperatures
    }


def chosen_images(trained: TrainedSeed, config: ShiftConfig) -> tuple[Tensor, Tensor]:
    """The test images to corrupt, uint8 [N, S, S, 3], and their targets; the same for all runs."""
    split = trained.data.real.test
    count = min(config.images or len(split), len(split))
    generator = torch.Generator().manual_seed(derived_seed(SEED, "shifted images"))
    chosen = torch.randperm(len(split), generator=generator)[:count].sort().values.numpy()
    return torch.from_numpy(split.images(chosen)), torch.from_numpy(split.targets[chosen])


def _cell(logits: Tensor, targets: Tensor, temperature: float, bins: int) -> dict[str, float]:
    plain = calibration_metrics(logits, targets, bins).as_dict()
    scaled = calibration_metrics(logits / temperature, targets, bins).as_dict()
    after = {f"scaled_{name}": scaled[name] for name in AFTER_SCALING}
    return {name: plain[name] for name in MEASURES} | after


def _with_means(corruptions: dict[str, Cells]) -> dict[str, Any]:
    """With the mean over severities for each corruption, and over both."""
    for cells in corruptions.values():
        cells[MEAN] = _mean(list(cells.values()))
    overall = _mean([cells[MEAN] for cells in corruptions.values()])
    return {MEAN: overall, "corruptions": corruptions}


def _mean(cells: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(cell[name] for cell in cells) for name in cells[0]}
