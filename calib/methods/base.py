"""What every training method is to the trainer: how a batch of real images becomes a loss."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from calib.batches import Batch
from calib.feedback import Feedback
from calib.losses.base import RealLoss
from calib.models.base import ImageClassifier

# Images, uint8 or float [N, S, S, 3] in 0..255, to logits [N, K] and features [N, D].
Forward = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """Of one batch.

    Attributes:
        loss: float32 scalar, a mean over the batch.
        logits, targets: [M, K] and [M], from which the training accuracy is told; of mixed images
            the target is the heavier class.
    """

    loss: Tensor
    logits: Tensor
    targets: Tensor


class Method(nn.Module):
    """A module from a batch of real images to its loss; it may have state of its own.

    Its parameters belong to the optimiser, its state to the checkpoint. Random numbers come from
    torch's global generator, which the trainer seeds for each epoch and process.

    Attributes:
        losses: names of the losses it works with; None takes any.
    """

    losses: tuple[str, ...] | None = None

    def adapt(self, backbone: ImageClassifier) -> None:
        """Change a fresh network before it is trained or loaded; most leave it alone."""

    def start_epoch(self, backbone: ImageClassifier, epoch: int, epochs: int) -> None:
        """Called before every epoch."""

    def forward(self, network: Forward, batch: Batch, loss: RealLoss) -> Outcome:
        raise NotImplementedError

    def after_backward(self, backbone: ImageClassifier) -> None:
        """Called between backward and the optimiser's step."""

    def end_epoch(self, backbone: ImageClassifier, feedback: Feedback) -> None:
        """Called after every epoch, in every process."""


class Plain(Method):
    """The loss of the images as they are."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()

    def forward(self, network: Forward, batch: Batch, loss: RealLoss) -> Outcome:
        logits, features = network(batch.images)
        value = loss(logits, batch.targets, features=features, indices=batch.indices)
        return Outcome(value, logits, batch.targets)
