"""A loss against its formula, written plainly in float64: value, and gradient by differences."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from calib.losses.base import RealLoss

STEP = 1e-6

# z: the K logits of a sample; y: its class; held: the logits again, where no gradient flows.
Formula = Callable[[np.ndarray, int, np.ndarray], float]


def batch(*, samples: int = 12, classes: int = 5, scale: float = 4.0, seed: int = 0):
    """Logits [N, K], half of them predicted right with some confidence, and targets [N]."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.standard_normal((samples, classes))
    targets = rng.integers(classes, size=samples)
    targets[::2] = logits[::2].argmax(1)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(targets)


def assert_agrees(loss: RealLoss, formula: Formula, logits: Tensor, targets: Tensor) -> None:
    """Compare the loss of a batch with the mean of the formula over its samples."""
    value, gradient = _by_differences(formula, logits.double().numpy(), targets.tolist())
    logits = logits.clone().requires_grad_()
    got = loss(logits, targets)
    (found,) = torch.autograd.grad(got, logits)
    torch.testing.assert_close(got.detach().double(), torch.tensor(value).double())
    torch.testing.assert_close(found.double(), torch.tensor(gradient), rtol=1e-4, atol=1e-7)


def softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max())
    return powers / powers.sum()


def _by_differences(
    formula: Formula, logits: np.ndarray, targets: list[int]
) -> tuple[float, np.ndarray]:
    total, gradient = 0.0, np.zeros_like(logits)
    for n, (row, y) in enumerate(zip(logits, targets, strict=True)):
        total += formula(row, y, row)
        for k in range(len(row)):
            nudge = STEP * (np.arange(len(row)) == k)
            rise = formula(row + nudge, y, row) - formula(row - nudge, y, row)
            gradient[n, k] = rise / (2 * STEP) / len(logits)
    return total / len(logits), gradient
