"""The base class of training methods: how a batch of real images becomes a loss."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from semix.calib.batches import TrainingBatch
from semix.calib.config.method import MethodConfig
from semix.calib.losses import MixedLoss
from semix.calib.losses.base import Feedback, RealLoss
from semix.calib.models.base import ImageClassifier

# Images, uint8 or float [N, S, S, 3] in 0..255, to logits [N, K] and features [N, D].
Forward = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class BatchOutcome:
    """Loss and outputs of one batch.

    Attributes:
        loss: float32 scalar, a mean over the batch.
        logits, targets: [M, K] and [M], for the training accuracy; the target of a mixed image is
            its heavier class.
    """

    loss: Tensor
    logits: Tensor
    targets: Tensor


class Method(nn.Module):
    """A module from a batch of real images to its loss, with or without state.

    Its parameters are in the optimiser, its state in the checkpoint. Random numbers come from
    torch's global generator, which the trainer seeds for each epoch and process.

    Attributes:
        losses: names of the losses it works with; None takes any.
    """

    losses: tuple[str, ...] | None = None

    def adapt(self, backbone: ImageClassifier) -> None:
        """Change a fresh network before it is trained or loaded; most methods change nothing.

        The method defines the network's output in training mode; in eval mode it is logits [N, K].
        """

    def start_epoch(self, backbone: ImageClassifier, epoch: int, epochs: int) -> None:
        """Called before every epoch."""

    def forward(self, network: Forward, batch: TrainingBatch, loss: RealLoss) -> BatchOutcome:
        raise NotImplementedError

    def on_mixed(
        self, network: Forward, images: Tensor, labels: Tensor, loss: MixedLoss
    ) -> tuple[Tensor, Tensor]:
        """Loss of images from a mixed dataset, uint8 [N, S, S, 3], with soft labels [N, K]; and
        the network's logits [N, K]."""
        logits, _ = network(images)
        return loss(logits, labels), logits

    def after_backward(self, backbone: ImageClassifier) -> None:
        """Called once per step, after backward and before clipping and the optimiser's step."""

    def end_epoch(self, backbone: ImageClassifier, feedback: Feedback) -> None:
        """Called after every epoch, in every process, before any other use of feedback, as this
        method may change the network's outputs."""


class Plain(Method):
    """The loss of the images without mixing."""

    def __init__(self, num_classes: int, settings: MethodConfig) -> None:
        super().__init__()

    def forward(self, network: Forward, batch: TrainingBatch, loss: RealLoss) -> BatchOutcome:
        logits, features = network(batch.images)
        value = loss(logits, batch.targets, features=features, indices=batch.indices)
        return BatchOutcome(value, logits, batch.targets)
