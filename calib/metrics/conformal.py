"""Conformal sets: classes that hold the true one as often as asked, fitted on validation images."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Score = Literal["thr", "aps", "raps"]
SCORES: tuple[Score, ...] = get_args(Score)
PENALTY, FREE_RANK = 0.1, 1  # of RAPS, as torch-uncertainty has them


@dataclass(frozen=True)
class ConformalSets:
    """What sets of one score did on test images.

    Attributes:
        coverage: the share that holds the true class.
        size: classes in a set, on average; none is empty.
    """

    coverage: float
    size: float


def nonconformity(probabilities: Tensor, score: Score) -> Tensor:
    """How strange each class would be, [N, K].

    thr: 1 - p. aps: the mass of all classes at least as likely. raps: that, and 0.1 for each rank
    below the first. None is randomised, so aps and raps cover more than they are asked for.

    Source: Sadinle, Lei and Wasserman 2019; Romano, Sesia and Candes 2020; Angelopoulos et al.
    2021.
    """
    if score == "thr":
        return 1 - probabilities
    ordered, classes = probabilities.sort(dim=1, descending=True)
    strange = ordered.cumsum(1)
    if score == "raps":
        ranks = torch.arange(1, probabilities.shape[1] + 1)
        strange = strange + PENALTY * (ranks - FREE_RANK).clamp(min=0)
    return torch.empty_like(strange).scatter_(1, classes, strange)


def threshold(held_out: Tensor, targets: Tensor, miss: float) -> float:
    """The least strangeness that covers 1 - miss of new images, infinite if too few were held out.

    It is the ceil((N + 1)(1 - miss))-th smallest of the true classes', which makes the promise
    hold for N images; libraries that take the plain quantile promise a little more than they hold.

    Args:
        held_out: [N, K], from `nonconformity`.
    """
    true = held_out.gather(1, targets[:, None])[:, 0]
    rank = math.ceil((len(true) + 1) * (1 - miss))
    return math.inf if rank > len(true) else true.kthvalue(rank).values.item()


def sets_within(strange: Tensor, limit: float) -> Tensor:
    """Which classes each set holds, [N, K] bool; the least strange one always."""
    chosen = strange <= limit
    return chosen.scatter_(1, strange.argmin(1, keepdim=True), True)


def conformal_sets(
    held_out: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, score: Score, miss: float
) -> ConformalSets:
    """Sets fitted on held-out images and measured on test images.

    Args:
        held_out, test: logits [N, K], best after temperature scaling, and targets [N].
        miss: share of sets that may lack the true class.
    """
    (fitted, known), (logits, targets) = held_out, test
    limit = threshold(nonconformity(fitted.double().softmax(1), score), known, miss)
    chosen = sets_within(nonconformity(logits.double().softmax(1), score), limit)
    held = chosen.gather(1, targets[:, None])[:, 0]
    return ConformalSets(held.double().mean().item(), chosen.sum(1).double().mean().item())
