"""What the measures need of a set of logits, taken in one pass over them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.metrics.class_bins import ClassBins, ClassBinsSum
from calib.metrics.softmax import hits, softmax_rows


@dataclass(frozen=True)
class Predictions:
    """What each sample contributes; means over samples are the measures."""

    confidence: Tensor  # [N] float64 in (0, 1], probability of the predicted class
    correct: Tensor  # [N] float64, 1 where the predicted class is the target
    nll: Tensor  # [N] float64, -log p_y in nats
    brier: Tensor  # [N] float64 in [0, 2], sum_k (p_k - [y = k])^2
    precision: torch.dtype  # of the logits; confidences are put into bins in it
    classes: ClassBins


def read_predictions(logits: Tensor, targets: Tensor, bins: int) -> Predictions:
    """One pass over checked logits [N, K] and targets [N]."""
    parts, start = [], 0
    classes = ClassBinsSum(logits.shape[1], bins, precision=logits.dtype)
    for rows in softmax_rows(logits):
        wanted = targets[start : start + len(rows.rest)]
        start += len(wanted)
        probabilities = rows.exponentials.div_((1 + rows.rest).to(logits.dtype)[:, None])
        classes.add(probabilities, wanted)
        found = probabilities.gather(1, wanted[:, None])[:, 0]
        squares = torch.linalg.vecdot(probabilities, probabilities)
        parts.append((rows.highest, rows.rest, found.double(), squares.double()))
    highest, rest, found, squares = (torch.cat(part) for part in zip(*parts, strict=True))
    behind = highest - logits.gather(1, targets[:, None])[:, 0]
    others = (squares - found.square()).clamp(min=0)  # below 0 by rounding alone
    return Predictions(
        confidence=1 / (1 + rest),
        correct=hits(logits, targets, highest=highest, rest=rest).double(),
        nll=rest.log1p() + behind.double(),
        brier=(1 - found).square() + others,
        precision=logits.dtype,
        classes=classes.finish(),
    )
