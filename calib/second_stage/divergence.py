"""A second stage whose loss or weights are no numbers any more ends at once."""

import math

from torch import nn

from calib.divergence import Diverged, refuse_not_finite


def refuse_diverged(loss: float, objective: nn.Module) -> None:
    """Raises Diverged if the loss, or anything in the state, is NaN or infinite."""
    try:
        if not math.isfinite(loss):
            raise Diverged("the loss is NaN or infinite")
        refuse_not_finite(objective.state_dict())
    except Diverged as error:
        remedy = "lower head.optimiser.learning_rate, and train in a fresh run folder"
        raise Diverged(f"{error}; {remedy}") from None
