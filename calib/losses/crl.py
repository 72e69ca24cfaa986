"""CRL: samples that were more often predicted rightly shall be more confident."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from calib.feedback import Feedback
from calib.losses.across_processes import all_rows
from calib.losses.base import RealLoss
from calib.parameters import in_range, one_of

CONFIDENCES = ("softmax", "entropy", "margin")


class CorrectnessRanking(RealLoss):
    """-log p_y, averaged, + weight mean_i max(0, |s_i - s_j| - t (c_i - c_j)).

    j is the next sample of the batch, for the last one the first; c is the confidence and s the
    share of a sample's right predictions in training so far; t = sign(s_i - s_j), and pairs with
    t = 0 count 0. A batch enters the history after its own loss. Batch and history are those of
    all processes.

    Args:
        weight: from 0.
        confidence: "softmax" is max_k p_k; "entropy" is sum_k p_k log p_k / log K, in [-1, 0];
            "margin" is the largest p_k less the second.
        num_samples: images of the training set, which `indices` number from 0.
        variant: "code" has s = (r - min r) / max(1, E - min r), r the right predictions of a
            sample, the minimum over all samples and E the epochs completed; the official code
            takes max(1, E) - min r and divides by 0 where all samples were always right. "paper"
            has s = r / (times seen).
    Raises:
        InputError: a value out of range.
        ValueError: indices are missing, or a training batch of one sample, which has no pair.

    Source: Moon et al. 2020, Confidence-Aware Learning, and its official code.
    """

    right: Tensor  # [num_samples] int64, right predictions of each training sample
    seen: Tensor  # [num_samples] int64, times it was in a batch
    epochs: Tensor  # [1] int64, epochs completed

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 1.0,
        confidence: Literal["softmax", "entropy", "margin"] = "softmax",
        num_samples: int = 0,
        variant: Literal["code", "paper"] = "code",
    ) -> None:
        super().__init__()
        in_range("loss.weight", weight, low=0, high=1e6, what="must be 0 or more")
        one_of("loss.confidence", confidence, CONFIDENCES)
        what = "give the number of training images, at least 1"
        in_range("loss.num_samples", num_samples, low=1, what=what, whole=True)
        one_of("loss.variant", variant, ("code", "paper"))
        self.weight, self.confidence, self.variant = weight, confidence, variant
        self.register_buffer("right", torch.zeros(num_samples, dtype=torch.long))
        self.register_buffer("seen", torch.zeros(num_samples, dtype=torch.long))
        self.register_buffer("epochs", torch.zeros(1, dtype=torch.long))

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        if indices is None or indices.shape != targets.shape:
            found = None if indices is None else tuple(indices.shape)
            raise ValueError(f"indices are {found}: CRL needs [{len(targets)}], one a sample")
        logits = logits.float()
        confidence = all_rows(self._confidence(logits), training=self.training)
        known = torch.stack([indices, logits.argmax(1) == targets], dim=1)
        indices, right = all_rows(known, training=self.training).unbind(1)
        if self.training and len(indices) < 2:
            raise ValueError("logits have 1 row: CRL compares pairs of samples; give 2")
        ranking = self._ranking(confidence, self._share(indices))
        if self.training:
            self.right.index_add_(0, indices, right)
            self.seen.index_add_(0, indices, torch.ones_like(right))
        return functional.cross_entropy(logits, targets) + self.weight * ranking

    def end_epoch(self, feedback: Feedback) -> None:
        self.epochs += 1

    def _confidence(self, logits: Tensor) -> Tensor:
        """c, [N]."""
        if self.confidence == "entropy":
            log_p = logits.log_softmax(1)
            return (log_p.exp() * log_p).sum(1) / math.log(logits.shape[1])
        largest = logits.softmax(1).topk(2, dim=1).values
        return largest[:, 0] - largest[:, 1] if self.confidence == "margin" else largest[:, 0]

    def _share(self, indices: Tensor) -> Tensor:
        """s of these samples, [N] float32."""
        if self.variant == "paper":
            return self.right[indices] / self.seen[indices].clamp(min=1)
        least = self.right.min()
        return (self.right[indices] - least) / (self.epochs - least).clamp(min=1)

    @staticmethod
    def _ranking(confidence: Tensor, share: Tensor) -> Tensor:
        ahead = share - share.roll(-1)
        lead = confidence - confidence.roll(-1)
        return (ahead.abs() - ahead.sign() * lead).relu().mean()
