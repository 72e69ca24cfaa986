"""CPC: the true class is told from each other class, and those others not from each other."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from calib.losses.pointwise import PointwiseLoss, log_probability
from calib.parameters import in_range, one_of


class PairwiseConstraints(PointwiseLoss):
    """-log p_y + binary_weight D + exclusion_weight E, averaged over the batch.

    D = the mean over k != y of -log sigmoid(z_y - z_k): the true class is told from each other.
    E = the mean over ordered pairs j != k of the K - 1 others of -log sigmoid(z_j - z_k) / 2,
    which is least where these logits are equal. With K = 2 there is no such pair and E is 0.
    Takes memory for N (K - 1)^2 numbers.

    Args:
        binary_weight, exclusion_weight: from 0.
        variant: "code" also sums over j = k, which adds log 2 / (2 (K - 2)) to E and nothing to
            the gradient; "paper" does not.
    Raises:
        InputError: a value out of range.

    Source: Cheng and Vasconcelos 2022, Calibrating Deep Neural Networks by Pairwise Constraints;
        the codes of CALS and BalCAL.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        binary_weight: float = 0.1,
        exclusion_weight: float = 1.0,
        variant: Literal["code", "paper"] = "code",
    ) -> None:
        super().__init__()
        what = "must be 0 or more"
        in_range("loss.binary_weight", binary_weight, low=0, high=1e6, what=what)
        in_range("loss.exclusion_weight", exclusion_weight, low=0, high=1e6, what=what)
        one_of("loss.variant", variant, ("code", "paper"))
        self.binary_weight, self.exclusion_weight = binary_weight, exclusion_weight
        self.variant = variant

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        others = _others(logits, targets)  # [N, K - 1]
        binary = functional.softplus(others - logits.gather(1, targets[:, None])).mean(1)
        return (
            -log_probability(logits, targets)
            + self.binary_weight * binary
            + self.exclusion_weight * self._exclusion(others)
        )

    def _exclusion(self, others: Tensor) -> Tensor:
        count = others.shape[1]
        if count < 2:
            return torch.zeros_like(others[:, 0])
        # -log sigmoid(-d) = softplus(d); the pairs j = k add log 2 each.
        total = functional.softplus(others[:, None] - others[:, :, None]).sum((1, 2)) / 2
        if self.variant == "paper":
            total = total - count * math.log(2) / 2
        return total / (count * (count - 1))


def _others(logits: Tensor, targets: Tensor) -> Tensor:
    """The logits of all classes but the true one, [N, K - 1], in order."""
    place = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, place + (place >= targets[:, None]))
