"""Brier score as a loss: squared distance of the probabilities from the label."""

from torch import Tensor
from torch.nn import functional

from calib.losses.pointwise import PointwiseLoss


class Brier(PointwiseLoss):
    """sum_k (p_k - onehot_k)^2, in [0, 2], averaged over the batch.

    Source: Brier 1950; as a training loss in Mukhoti et al. 2020, whose code agrees.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        label = functional.one_hot(targets, logits.shape[1])
        return (logits.softmax(1) - label).square().sum(1)
