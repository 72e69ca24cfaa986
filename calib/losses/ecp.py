"""ECP: entropy of the prediction is rewarded."""

from typing import Literal

from torch import Tensor

from calib.losses.pointwise import PointwiseLoss, log_probability
from calib.parameters import in_range, one_of


class EntropyConfidencePenalty(PointwiseLoss):
    """-log p_y - weight H(p), averaged over the batch, where H(p) averages -p_k log p_k over k.

    Args:
        weight: of the entropy, from 0.
        variant: "code" takes the mean of the entropy over classes, as the code of MbLS and its
            descendants does, so the weight is K times weaker than in "paper", which sums.
    Raises:
        InputError: a value out of range.

    Source: Pereyra et al. 2017, Regularizing Neural Networks by Penalizing Confident Output
    Distributions, section 3.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        weight: float = 0.1,
        variant: Literal["code", "paper"] = "code",
    ) -> None:
        super().__init__()
        in_range("loss.weight", weight, low=0, high=1e6, what="must be 0 or more")
        one_of("loss.variant", variant, ("code", "paper"))
        self.weight = weight if variant == "paper" else weight / num_classes

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = logits.log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1)
        return -log_probability(logits, targets) - self.weight * entropy
