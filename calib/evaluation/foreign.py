"""Out-of-distribution datasets: how well confidence tells their images from the run's own."""

import statistics
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from calib.classifier import Stage
from calib.evaluation.checks import MEAN
from calib.evaluation.predicting import images_of
from calib.evaluation.trained import TrainedSeed
from calib.metrics import max_probability, negative_entropy, ood_metrics
from data.real import load_real
from data.splits import RealDataConfig

Ood = dict[str, dict[str, float]]


def measure_ood(
    trained: TrainedSeed, sets: Mapping[str, RealDataConfig], test: Mapping[Stage, Tensor]
) -> dict[Stage, Ood]:
    """AUROC and FPR95 of each stage for the test images of every dataset, and their means.

    Args:
        sets: read at the run's image size, whatever theirs says.
        test: logits of the run's own test images, [N, K].
    Returns:
        For each stage {name: {"images", "auroc", "fpr95", "entropy_auroc", "entropy_fpr95"},
        "mean": {...}}; without `entropy_` the score is the largest probability.
    """
    size = trained.config.real.image_size
    rows: dict[Stage, Ood] = {stage: {} for stage in trained.stages}
    for name, config in sets.items():
        split = load_real(config.model_copy(update={"image_size": size})).test
        found = trained.predict(images_of(split), len(split), what=name)
        for stage, logits in found.items():
            rows[stage][name] = {"images": len(split), **_compared(test[stage], logits)}
    return {stage: {**row, MEAN: _mean(row)} for stage, row in rows.items()}


def _compared(known: Tensor, foreign: Tensor) -> dict[str, float]:
    probability = ood_metrics(max_probability(known), max_probability(foreign)).as_dict()
    entropy = ood_metrics(negative_entropy(known), negative_entropy(foreign)).as_dict()
    return probability | {f"entropy_{name}": value for name, value in entropy.items()}


def _mean(row: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    names = [name for name in next(iter(row.values())) if name != "images"]
    return {name: statistics.fmean(cell[name] for cell in row.values()) for name in names}
