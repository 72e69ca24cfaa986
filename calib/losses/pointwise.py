"""What every loss is that judges a sample by its own logits and class alone."""

from torch import Tensor

from calib.losses.base import RealLoss


class PointwiseLoss(RealLoss):
    """The mean over the batch of `per_sample`, in float32 whatever the precision of the logits.

    Official code of several of these losses sums over the batch instead; a mean leaves the
    learning rate alone when the batch size changes.
    """

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        return self.per_sample(logits.float(), targets).mean()

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, [N] float32.

        Args:
            logits: [N, K] float32.
            targets: [N] int64.
        """
        raise NotImplementedError


def log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """log p_y of each sample, [N], from logits [N, K] and targets [N]."""
    return logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
