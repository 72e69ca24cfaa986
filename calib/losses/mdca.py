"""MDCA: each class's mean probability is pulled to its share of the batch."""

from typing import Literal

from torch import Tensor
from torch.nn import functional

from calib.losses.across_processes import all_rows
from calib.losses.base import RealLoss
from calib.losses.cross_entropy import CrossEntropy
from calib.losses.focal import Focal
from calib.parameters import in_range, one_of


class MDCA(RealLoss):
    """Base loss + weight mean_k |mean_n p_nk - mean_n 1[y_n = k]|, n over all processes' samples.

    Args:
        weight: from 0; 1 in the official scripts, 10 as their program's default.
        base: "ce" or "focal", each a mean over the batch.
        gamma: of the focal base, from 0.
    Raises:
        InputError: a value out of range.

    Source: Hebbalaguppe et al. 2022, A Stitch in Time Saves Nine, and its official code.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 1.0,
        base: Literal["ce", "focal"] = "ce",
        gamma: float = 1.0,
    ) -> None:
        super().__init__()
        in_range("loss.weight", weight, low=0, high=1e6, what="must be 0 or more")
        one_of("loss.base", base, ("ce", "focal"))
        focal = Focal(num_classes, gamma=gamma)  # checks gamma whatever the base
        self.base = focal if base == "focal" else CrossEntropy(num_classes)
        self.weight = weight

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        logits = logits.float()
        gaps = logits.softmax(1) - functional.one_hot(targets, logits.shape[1])  # [N, K]
        means = all_rows(gaps.mean(0, keepdim=True), training=self.training)  # [P, K]
        return self.base(logits, targets) + self.weight * means.mean(0).abs().mean()
