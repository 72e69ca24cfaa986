"""Test images under common corruptions, and out-of-distribution (OOD) images."""

import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from semix.calib.calibration import Calibration
from semix.calib.calibrators.base import Calibrator
from semix.calib.check import MEAN, corruption_names
from semix.calib.config import OODDataConfig, ShiftConfig
from semix.calib.corruptions import corrupt
from semix.calib.evaluate.ensemble import SeedEnsemble
from semix.calib.evaluate.predictions import TrainedSeed
from semix.calib.metrics import max_probability, negative_entropy, ood_metrics
from semix.calib.metrics.measures import measured
from semix.calib.real_images import ImageSource, open_images
from semix.calib.run_folder import Shift, StageName
from semix.data.fingerprint import derived_seed
from semix.data.real import load_real
from semix.data.splits import in_grey

SEED = 0  # the same corrupted images for every run, so that runs can be compared
MEASURES = ("accuracy", "ece", "adaptive_ece", "classwise_ece", "nll", "brier")
CALIBRATED_MEASURES = ("ece", "nll")  # also after calibrators fitted on clean validation images
ByMeasure = dict[str, float]  # the value of each measure
Classifiers = TrainedSeed | SeedEnsemble


def measure_shift(
    trained: Classifiers, config: ShiftConfig, calibrations: Mapping[StageName, Calibration]
) -> dict[StageName, Shift]:
    """The measures of each stage under every corruption and severity.

    Args:
        calibrations: of each stage; empty except in the main process, which alone measures.
    """
    calibrators: dict[StageName, dict[str, Calibrator]] = {
        stage: {
            name: fitted.calibrators[name]
            for name in ("scaled", *config.calibrators)
            if name in fitted.calibrators
        }
        for stage, fitted in calibrations.items()
    }
    images, targets = images_to_corrupt(trained, config)
    cells: dict[StageName, dict[str, dict[str, ByMeasure]]] = {
        stage: {} for stage in trained.stages
    }
    for name in corruption_names(config):
        for severity in config.severities:
            load = partial(_corrupted, images, name, severity)
            logits = trained.predict(load, len(images), what=f"{name} {severity}")
            for stage, fitted in calibrators.items():
                cell = measure_cell(logits[stage], targets, fitted, config.bins)
                cells[stage].setdefault(name, {})[str(severity)] = cell
    for by_severity in (row for stage in calibrators for row in cells[stage].values()):
        by_severity[MEAN] = _mean(list(by_severity.values()))
    return {
        stage: {
            "bins": config.bins,
            "images": len(images),
            "mean": _mean([by_severity[MEAN] for by_severity in cells[stage].values()]),
            "corruptions": cells[stage],
        }
        for stage in calibrators
    }


def _corrupted(
    images: ImageSource, name: str, severity: int, indices: Sequence[Tensor]
) -> Generator[Tensor, None, None]:
    with closing(images.chunks(indices)) as chunks:
        for numbers, chunk in zip(indices, chunks, strict=True):
            first = int(numbers[0])
            yield torch.from_numpy(corrupt(chunk.numpy(), name, severity, seed=SEED, first=first))


def images_to_corrupt(trained: Classifiers, config: ShiftConfig) -> tuple[ImageSource, Tensor]:
    """The test images to corrupt, and their targets; the same for all runs."""
    split = trained.data.real.test
    count = min(config.images or len(split), len(split))
    generator = torch.Generator().manual_seed(derived_seed(SEED, "shifted images"))
    indices = torch.randperm(len(split), generator=generator)[:count].sort().values.numpy()
    data, limit = trained.data, trained.data.memory_limit
    images = open_images(split.subset(indices), data.side, limit=limit, workers=data.workers)
    return images, torch.from_numpy(split.targets[indices])


def measure_cell(
    logits: Tensor, targets: Tensor, calibrators: Mapping[str, Calibrator], bins: int
) -> ByMeasure:
    """The measures of one corruption and severity; those of a calibrator begin with its name."""
    values = measured(logits, targets, MEASURES, bins=bins)
    for kind, calibrator in calibrators.items():
        calibrated = measured(calibrator(logits), targets, CALIBRATED_MEASURES, bins=bins)
        values |= {f"{kind}_{name}": value for name, value in calibrated.items()}
    return values


def _mean(cells: list[ByMeasure]) -> ByMeasure:
    names = [name for name in cells[0] if name != "images"]
    return {name: statistics.fmean(cell[name] for cell in cells) for name in names}


Ood = dict[str, ByMeasure]


def measure_ood(
    trained: Classifiers, datasets: Mapping[str, OODDataConfig], test: Mapping[StageName, Tensor]
) -> dict[StageName, Ood]:
    """AUROC and FPR95 of each stage for the test images of every dataset, and their means.

    Args:
        datasets: of OOD images, read at the run's image size instead of their own.
        test: logits of the run's own test images, [N, K].
    Returns:
        {name: {"images", "auroc", "fpr95", "entropy_auroc", "entropy_fpr95"}, "mean": {...}} per
        stage; without `entropy_` the score is the largest probability.
    """
    size = trained.config.real.image_size
    metrics: dict[StageName, Ood] = {stage: {} for stage in test}
    for name, config in datasets.items():
        split = load_real(config.model_copy(update={"image_size": size})).test
        split = in_grey(split) if config.grey else split
        logits = trained.predict(trained.data.stream(split).chunks, len(split), what=name)
        for stage, in_logits in test.items():
            metrics[stage][name] = {"images": len(split), **_separation(in_logits, logits[stage])}
    return {
        stage: {**values, MEAN: _mean(list(values.values()))} for stage, values in metrics.items()
    }


def _separation(in_logits: Tensor, out_logits: Tensor) -> ByMeasure:
    probability = ood_metrics(max_probability(in_logits), max_probability(out_logits)).as_dict()
    entropy = ood_metrics(negative_entropy(in_logits), negative_entropy(out_logits)).as_dict()
    return probability | {f"entropy_{name}": value for name, value in entropy.items()}
