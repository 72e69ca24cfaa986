"""Conformal prediction sets.

They are calibrated on validation images to contain the true class at a chosen rate.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Score = Literal["thr", "aps", "raps"]
SCORES: tuple[Score, ...] = get_args(Score)
PENALTY, FREE_RANK = 0.1, 1  # of RAPS, the defaults of torch-uncertainty


@dataclass(frozen=True)
class ConformalSets:
    """Coverage and size of the sets of one score on test images.

    Attributes:
        coverage: the fraction of sets that hold the true class.
        size: average set size, in classes; no set is empty.
    """

    coverage: float
    size: float


def nonconformity(probabilities: Tensor, score: Score) -> Tensor:
    """The nonconformity score of each class, [N, K].

    thr: 1 - p. aps: the mass of all classes at least as likely. raps: that plus 0.1 per rank below
    the first. No score is randomised, so aps and raps cover more than 1 - miscoverage.

    Source: Sadinle, Lei and Wasserman 2019; Romano, Sesia and Candes 2020; Angelopoulos et al.
    2021.
    """
    if score == "thr":
        return 1 - probabilities
    ordered, classes = probabilities.sort(dim=1, descending=True)
    scores = ordered.cumsum(1)
    if score == "raps":
        ranks = torch.arange(1, probabilities.shape[1] + 1)
        scores = scores + PENALTY * (ranks - FREE_RANK).clamp(min=0)
    return torch.empty_like(scores).scatter_(1, classes, scores)


def threshold(calibration_scores: Tensor, targets: Tensor, miscoverage: float) -> float:
    """The threshold with which the sets contain the true class at the rate 1 - miscoverage or more.

    It is the ceil((N + 1)(1 - miscoverage))-th smallest score of a true class, inf if N is too
    small. The + 1 makes the rate hold on new images for a finite number N of calibration images;
    libraries that take the plain quantile cover slightly less.

    Args:
        calibration_scores: [N, K], from `nonconformity` on calibration images.
        targets: [N], their true classes.
    """
    true_scores = calibration_scores.gather(1, targets[:, None])[:, 0]
    rank = math.ceil((len(true_scores) + 1) * (1 - miscoverage))
    return math.inf if rank > len(true_scores) else true_scores.kthvalue(rank).values.item()


def sets_within(scores: Tensor, limit: float) -> Tensor:
    """Which classes each set holds, [N, K] bool; it always holds the class of the lowest score."""
    sets = scores <= limit
    return sets.scatter_(1, scores.argmin(1, keepdim=True), True)


def measure_sets(logits: Tensor, targets: Tensor, *, score: Score, limit: float) -> ConformalSets:
    """Coverage and size of the sets of test images.

    Args:
        logits, targets: [N, K] and [N].
        limit: from `threshold`, of logits calibrated in the same way.
    """
    sets = sets_within(nonconformity(logits.double().softmax(1), score), limit)
    covered = sets.gather(1, targets[:, None])[:, 0]
    return ConformalSets(covered.double().mean().item(), sets.sum(1).double().mean().item())
