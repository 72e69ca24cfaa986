"""Weights of pairs of classes, by what a run's classifiers say of images it set aside."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from semix.calib.network import load_trained, predict
from semix.calib.run_folder import DATA, read_data, require_trained, run_digest
from semix.calib.training_data import real_digest
from semix.data.device import resolve_device
from semix.data.errors import InputError
from semix.data.formats import PairWeighting
from semix.data.real import load_real

SET_ASIDE = "real.set_aside_per_class"


@dataclass(frozen=True)
class PairWeights:
    """Weights of all pairs of classes.

    Attributes:
        weights: of each pair of classes i < j; not negative, at least one positive.
        images: number of images that were judged.
        digest: of the settings and data of the run.
    """

    weights: dict[tuple[int, int], float]
    images: int
    digest: str


def weigh_pairs(
    run: Path, by: PairWeighting, *, class_names: Sequence[str], device: str = "auto"
) -> PairWeights:
    """Weigh pairs by the mean of a run's classifiers, as trained, on the images it set aside.

    No classifier, temperature or stopping rule of that run, or of any with the same section `real`,
    has seen these images.

    Raises:
        InputError: the run is not trained, set no images aside, has other classes, or its images
            changed; every weight is 0.
    """
    config, record = require_trained(run), read_data(run)
    if list(class_names) != record["class_names"]:
        remedy = f"has classes {', '.join(record['class_names'][:5])}, ..., and these data others"
        raise InputError("run", run, remedy)
    real = load_real(config.real)
    if real.set_aside is None:
        remedy = f"{run} trained on all of its images; train one with images set aside, as 20"
        raise InputError(SET_ASIDE, "nothing", remedy)
    if real_digest(real) != record["real"]:
        raise InputError(
            f"{run / DATA} real", record["real"], "its images changed since; restore them"
        )
    images = torch.from_numpy(real.set_aside.images())
    target = torch.device(resolve_device(device))
    networks = [load_trained(run, seed, config=config) for seed in config.seeds]
    logits = torch.stack([predict(network, images, device=target) for network in networks])
    probabilities = logits.double().softmax(-1).mean(0)
    targets = torch.from_numpy(real.set_aside.targets)
    measure = soft_confusion if by == "confusion" else calibration_gaps
    matrix = measure(probabilities, targets)
    pairs = combinations(range(len(class_names)), 2)
    weights = {(i, j): max(0.0, float(matrix[i, j])) for i, j in pairs}
    if not any(weights.values()):
        remedy = f"no pair has a positive weight on {len(targets)} images; choose another measure"
        raise InputError("by", by, remedy)
    return PairWeights(weights, len(targets), run_digest(config, record))


def soft_confusion(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Mean probability of class j on images of class i, and of i on those of j, averaged.

    Args:
        probabilities: float [N, K]; targets: int64 [N], in which every class occurs.
    Returns:
        Symmetric matrix [K, K] in [0, 1].
    """
    classes = probabilities.shape[1]
    means = torch.stack([probabilities[targets == i].mean(0) for i in range(classes)])
    return (means + means.T) / 2


def calibration_gaps(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Mean confidence less accuracy between two classes, on the images of both.

    Probabilities are renormalised to the pair, so that confidence is the larger of two shares. A
    positive gap is overconfidence.

    Args:
        probabilities, targets: as for `soft_confusion`.
    Returns:
        Symmetric matrix [K, K] in [-1, 1]; its diagonal is 0.
    """
    classes = probabilities.shape[1]
    gaps = torch.zeros(classes, classes, dtype=probabilities.dtype)
    for i, j in combinations(range(classes), 2):
        either = (targets == i) | (targets == j)
        pair, labels = probabilities[either][:, [i, j]], targets[either]
        confidence, place = (pair / pair.sum(1, keepdim=True)).max(1)
        correct = torch.where(place == 0, i, j) == labels
        gaps[i, j] = gaps[j, i] = (confidence - correct.to(confidence)).mean()
    return gaps
