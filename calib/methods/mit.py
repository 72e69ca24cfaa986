"""MIT: mixup in training, undone before the loss."""

import numpy as np
import torch
from torch import Tensor

from calib.batches import Batch
from calib.losses.base import RealLoss
from calib.methods.base import Forward, Method, Outcome
from calib.methods.mixing import blend, check_alpha, draw_partners
from calib.parameters import in_range
from data.errors import InputError

RAREST = 1e-3  # share of draws that must be far enough apart


class MIT(Method):
    """MIT-L: two blends of each pair, from whose logits those of the two images are recovered.

    The mean of the two images' cross-entropies; two passes a step. The training accuracy is that
    of the first image's recovered logits.

    Args:
        alpha: of Beta(alpha, alpha).
        margin: least distance of the two lambdas; the recovery divides by it.
    Raises:
        InputError: a parameter is out of range, or lambdas so far apart are hardly ever drawn.

    Source: Wang et al. 2023 (On the Pitfall of Mixup), and its official code.
    """

    losses = ("ce",)

    def __init__(self, num_classes: int, *, alpha: float = 0.5, margin: float = 0.5) -> None:
        super().__init__()
        check_alpha(alpha)
        in_range("method.margin", margin, low=0, high=0.999, what="must lie in [0, 1)")
        self.alpha, self.margin = alpha, max(margin, 1e-6)
        drawn = np.random.default_rng(0).beta(alpha, alpha, size=(10_000, 2))
        apart = np.abs(drawn - 0.5).sum(1) >= self.margin
        if apart.mean() < RAREST:
            remedy = f"with alpha {alpha:g} lambdas so far apart are hardly ever drawn; lower it"
            raise InputError("method.margin", margin, remedy)

    def forward(self, network: Forward, batch: Batch, loss: RealLoss) -> Outcome:
        weights, partners = draw_apart(self.alpha, self.margin), draw_partners(batch.targets)
        mixed = [network(blend(batch.images, partners, weight))[0] for weight in weights]
        own, other = recover(mixed[0], mixed[1], weights)
        value = (loss(own, batch.targets) + loss(other, batch.targets[partners])) / 2
        return Outcome(value, own, batch.targets)


def draw_apart(alpha: float, margin: float) -> tuple[float, float]:
    """lambda_1 >= 1/2 >= lambda_2, at least `margin` apart, from torch's global generator."""
    distribution = torch.distributions.Beta(alpha, alpha)
    while True:
        first, second = distribution.sample((2,)).tolist()
        heavier, lighter = max(first, 1 - first), min(second, 1 - second)
        if heavier - lighter >= margin:
            return heavier, lighter


def recover(first: Tensor, second: Tensor, weights: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Outputs of two images from those of their blends, as if the network were linear.

    Solves w_1 a + (1 - w_1) b = first and w_2 a + (1 - w_2) b = second.

    Args:
        first, second: [N, K].
        weights: w_1 > w_2, of image a in the two blends.
    Returns:
        a and b, float32 [N, K].
    """
    heavier, lighter = weights
    first, second = first.float(), second.float()
    a = ((1 - lighter) * first - (1 - heavier) * second) / (heavier - lighter)
    b = (heavier * second - lighter * first) / (heavier - lighter)
    return a, b
