"""A loss of a whole batch against its formula in float64: value, and gradient by differences."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from calib.losses.base import RealLoss

STEP = 1e-6

Formula = Callable[[np.ndarray], float]  # of the logits [N, K], float64


def assert_agrees(
    loss: RealLoss, formula: Formula, logits: Tensor, targets: Tensor, **inputs: Tensor
) -> None:
    """Compare the loss with the formula, and its gradient with slopes of the formula."""
    logits = logits.clone().requires_grad_()
    got = loss(logits, targets, **inputs)
    (found,) = torch.autograd.grad(got, logits)
    z = logits.detach().double().numpy()
    torch.testing.assert_close(got.detach().double(), torch.tensor(formula(z)).double())
    slopes = np.zeros_like(z)
    for place in np.ndindex(*z.shape):
        nudge = np.zeros_like(z)
        nudge[place] = STEP
        slopes[place] = (formula(z + nudge) - formula(z - nudge)) / (2 * STEP)
    torch.testing.assert_close(found.double(), torch.tensor(slopes), rtol=1e-4, atol=1e-7)


def probabilities(z: np.ndarray) -> list[list[float]]:
    """softmax of each row, as lists."""
    powers = np.exp(z - z.max(1, keepdims=True))
    return (powers / powers.sum(1, keepdims=True)).tolist()


def cross_entropy(z: np.ndarray, targets: Tensor) -> float:
    rows = zip(probabilities(z), targets.tolist(), strict=True)
    return -sum(np.log(p[y]) for p, y in rows) / len(z)


def confidences(z: np.ndarray, targets: Tensor) -> list[tuple[float, int]]:
    """Largest probability of each row, and 1 where it is that of the class."""
    rows = zip(probabilities(z), targets.tolist(), strict=True)
    return [(max(p), int(p.index(max(p)) == y)) for p, y in rows]
