"""What every loss on real images is to the trainer, which never asks which one it holds."""

from torch import Tensor, nn

from calib.feedback import Feedback


class RealLoss(nn.Module):
    """A module from a batch to one number; it may have parameters and buffers of its own.

    Its parameters belong to the optimiser, its state to the checkpoint.
    """

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Mean loss of the batch.

        Args:
            logits: [N, K] float, before softmax.
            targets: [N] int64, class numbers.
            features: [N, D] float, what the last linear layer sees.
            indices: [N] int64, each sample's place in the training set.
        Returns:
            A float32 scalar.
        """
        raise NotImplementedError

    def pop_health(self) -> dict[str, float | None]:
        """Figures that show whether the loss works, over the training batches since last asked."""
        return {}

    def end_epoch(self, feedback: Feedback) -> None:
        """Called after every training epoch, in every process; most losses learn nothing here."""
