"""MMCE: cross-entropy and a kernel measure of how far confidence is from being right."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from calib.losses.across_processes import all_rows
from calib.losses.base import RealLoss
from calib.parameters import in_range, one_of

EPS = 1e-10  # under the root, as in the official code: its gradient stays finite at 0
EPS_PAIRS = 1e-5  # added to numbers of pairs, likewise


class MMCE(RealLoss):
    """-log p_y, averaged, + weight M, M = sum_ij (a_i - c_i)(a_j - c_j) k(c_i, c_j) / B^2.

    c is the confidence max_k p_k, a is 1 where the prediction is right, and
    k(c, d) = exp(-|c - d| / bandwidth). The B samples are those of all processes.

    Args:
        weight: from 0.
        bandwidth: of the kernel, above 0.
        variant: "code" adds M; "paper" its square root, which is the measure itself.
    Raises:
        InputError: a value out of range.

    Source: Kumar et al. 2018, Trainable Calibration Measures; the codes of MbLS and CALS.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 1.0,
        bandwidth: float = 0.4,
        variant: Literal["code", "paper"] = "code",
    ) -> None:
        super().__init__()
        _check(weight, bandwidth, variant)
        self.weight, self.bandwidth, self.variant = weight, bandwidth, variant

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        logits = logits.float()
        confidence, right = _confidence(logits, targets, training=self.training)
        gap = right - confidence  # [B]
        error = (gap[:, None] * gap * _kernel(confidence, self.bandwidth)).mean()
        if self.variant == "paper":
            error = _root(error)
        return functional.cross_entropy(logits, targets) + self.weight * error


class WeightedMMCE(RealLoss):
    """-log p_y, averaged, + weight sqrt(M + 1e-10), right and wrong samples weighed apart.

    With m right and n wrong samples, M = R / m^2 + W / n^2 - 2 X / (m n): R sums
    (1 - c_i)(1 - c_j) k(c_i, c_j) over pairs of right samples, W c_i c_j k over pairs of wrong
    ones, X (1 - c_i) c_j k over right i and wrong j; c and k as in `MMCE`. The penalty is 0
    where all samples are right, or all wrong. The samples are those of all processes.

    Args:
        weight: from 0; 2 is focal_calibration's for CIFAR.
        bandwidth: of the kernel, above 0.
        variant: "paper" is that. "code" divides R, W and X, already means, by these numbers of
            pairs once more, as all official codes do, so the penalty is very small.
    Raises:
        InputError: a value out of range.
        ValueError: a training batch of one sample, which has no pair to compare.

    Source: Kumar et al. 2018; the code of focal_calibration.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 2.0,
        bandwidth: float = 0.4,
        variant: Literal["code", "paper"] = "code",
    ) -> None:
        super().__init__()
        _check(weight, bandwidth, variant)
        self.weight, self.bandwidth, self.variant = weight, bandwidth, variant

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        logits = logits.float()
        confidence, right = _confidence(logits, targets, training=self.training)
        if self.training and len(right) < 2:
            text = "logits have 1 row: weighted MMCE compares right with wrong samples; give 2"
            raise ValueError(text)
        penalty = self._penalty(confidence, right)
        return functional.cross_entropy(logits, targets) + self.weight * penalty

    def _penalty(self, confidence: Tensor, right: Tensor) -> Tensor:
        kernel = _kernel(confidence, self.bandwidth)
        wrong = 1 - right
        among_right, among_wrong = right * (1 - confidence), wrong * confidence

        def of_pairs(left: Tensor, other: Tensor, pairs: Tensor) -> Tensor:
            mean = (left[:, None] * other * kernel).sum() / pairs.clamp(min=1)
            return mean if self.variant == "paper" else mean / (pairs + EPS_PAIRS)

        m, n = right.sum(), wrong.sum()
        error = (
            of_pairs(among_right, among_right, m * m)
            + of_pairs(among_wrong, among_wrong, n * n)
            - 2 * of_pairs(among_right, among_wrong, m * n)
        )
        return torch.where((m > 0) & (n > 0), _root(error), 0.0)


def _confidence(logits: Tensor, targets: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    """c and a of all processes' samples, each [B] float32; c with its gradient."""
    confidence, predicted = logits.softmax(1).max(1)
    right = (predicted == targets).float()
    rows = all_rows(torch.stack([confidence, right], dim=1), training=training)
    return rows[:, 0], rows[:, 1].detach()


def _kernel(confidence: Tensor, bandwidth: float) -> Tensor:
    """k of all pairs, [B, B]."""
    return (-(confidence[:, None] - confidence).abs() / bandwidth).exp()


def _root(error: Tensor) -> Tensor:
    """sqrt(M + 1e-10); M is not negative but for rounding."""
    return (error.clamp(min=0) + EPS).sqrt()


def _check(weight: float, bandwidth: float, variant: str) -> None:
    in_range("loss.weight", weight, low=0, high=1e6, what="must be 0 or more")
    in_range("loss.bandwidth", bandwidth, low=1e-6, high=1e6, what="must be above 0")
    one_of("loss.variant", variant, ("code", "paper"))
