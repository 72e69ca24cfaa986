"""A head with the loss that trains it, told of every epoch and step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from calib.epochs import Figures
from calib.losses.base import RealLoss


class Objective(nn.Module):
    """The loss of a batch of features; its parameters are the head's and then the loss's.

    As it is, it trains a head that needs nothing but the loss's gradient, such as TST's.
    The stage calls, in this order:

        objective.start_epoch()
        loss, logits = objective(features, targets, indices); loss.backward()
        objective.after_backward(); optimiser.step(); objective.after_step()
        objective.end_epoch(accuracy=..., confidence=...)

    Attributes:
        extra_pass: whether accuracy and confidence come from a pass after the epoch, in eval
            mode, and not from the epoch's training passes.
    """

    extra_pass = False

    def __init__(self, head: nn.Module, loss: RealLoss) -> None:
        super().__init__()
        self.head, self.loss = head, loss

    def forward(self, features: Tensor, targets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and logits [B, K] of features [B, D], float32 all of them."""
        logits = self.head(features)
        return self.loss(logits, targets, features=features, indices=indices), logits

    def start_epoch(self) -> Figures:
        """Called before every epoch; returns what is in force during it."""
        return {}

    def after_backward(self) -> None:
        """Called between backward and the optimiser's step."""

    def after_step(self) -> None:
        """Called after the optimiser's step."""

    def end_epoch(self, *, accuracy: float, confidence: float) -> None:
        """Called after every epoch with means over the training images, in [0, 1]."""

    def objects(self) -> dict[str, Any]:
        """State besides that of head and loss, as plain values and tensors."""
        return {}

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Take what `objects` gave."""

    def describe(self, kept: Mapping[str, Tensor]) -> dict[str, Any]:
        """What is worth telling of a head with this state, as JSON values."""
        return {}
