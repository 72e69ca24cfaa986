"""A loss against its formula, written plainly in float64: value, and gradient by differences."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from semix.calib.losses.base import RealLoss

STEP = 1e-6

# z: the K logits of a sample; y: its class; detached: the logits again, without gradient.
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
    detached = logits.double().numpy()

    def mean(z: np.ndarray) -> float:
        rows = zip(z, targets.tolist(), detached, strict=True)
        return sum(formula(*row) for row in rows) / len(z)

    assert_batch_agrees(loss, mean, logits, targets)


def assert_batch_agrees(
    loss: RealLoss,
    formula: Callable[[np.ndarray], float],
    logits: Tensor,
    targets: Tensor,
    **inputs: Tensor,
) -> None:
    """Compare the loss with a formula of all logits [N, K], and its gradient with slopes of it."""
    logits = logits.clone().requires_grad_()
    got = loss(logits, targets, **inputs)
    (gradient,) = torch.autograd.grad(got, logits)
    z = logits.detach().double().numpy()
    torch.testing.assert_close(got.detach().double(), torch.tensor(formula(z)).double())
    slopes = np.zeros_like(z)
    for index in np.ndindex(*z.shape):
        nudge = np.zeros_like(z)
        nudge[index] = STEP
        slopes[index] = (formula(z + nudge) - formula(z - nudge)) / (2 * STEP)
    torch.testing.assert_close(gradient.double(), torch.tensor(slopes), rtol=1e-4, atol=1e-7)


def softmax(z: np.ndarray) -> np.ndarray:
    """The probabilities of a sample [K], or of each row [N, K]."""
    powers = np.exp(z - z.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def cross_entropy(z: np.ndarray, targets: Tensor) -> float:
    return -np.log(softmax(z)[np.arange(len(z)), targets.numpy()]).mean()


def confidences(z: np.ndarray, targets: Tensor) -> list[tuple[float, int]]:
    """Largest probability of each row, and 1 where it is that of the class."""
    p = softmax(z)
    return list(zip(p.max(1), (p.argmax(1) == targets.numpy()).astype(int), strict=True))
