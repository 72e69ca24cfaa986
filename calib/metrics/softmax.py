"""Softmax of many rows, a part at a time that stays in the processor's cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PART = 1 << 17  # values: 0.5 MB of float32; half and twice as many took longer


@dataclass(frozen=True)
class SoftmaxRows:
    """Some rows, in the order of the logits."""

    highest: Tensor  # [B], the row's largest logit
    exponentials: Tensor  # [B, K], exp(logits - highest)
    rest: Tensor  # [B] float64, their sum but the 1 of the largest


def softmax_rows(logits: Tensor) -> Iterator[SoftmaxRows]:
    """Walk over checked logits [N, K].

    Exponentials keep the precision of the logits, whose own rounding weighs more than theirs.
    They are summed in float64: 1 / (1 + rest) tells 1 - 1e-9 from 1 - 1e-12.
    """
    for part in logits.split(max(1, PART // logits.shape[1])):
        highest = part.amax(1, keepdim=True)
        exponentials = (part - highest).exp_()
        yield SoftmaxRows(highest[:, 0], exponentials, exponentials.sum(1, dtype=torch.float64) - 1)


def hits(logits: Tensor, targets: Tensor, *, highest: Tensor, rest: Tensor) -> Tensor:
    """Whether the predicted class is the target, bool [N]; of equal logits the first is predicted.

    Looking for where the largest logit is costs more than all the rest, so it is done only for
    rows in which another may be equal.
    """
    right = logits.gather(1, targets[:, None])[:, 0] == highest
    doubtful = (right & (rest >= 1)).nonzero()[:, 0]  # an equal logit adds another 1
    first = torch.from_numpy(logits[doubtful].numpy().argmax(1))
    right[doubtful] = first == targets[doubtful]
    return right
