"""Cross-entropy: -log p_y."""

from torch import Tensor
from torch.nn import functional

from calib.losses.base import RealLoss


class CrossEntropy(RealLoss):
    """The mean over the batch of -log p_y."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        return functional.cross_entropy(logits.float(), targets)
