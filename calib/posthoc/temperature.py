"""Temperature scaling: one number that divides all logits."""

import logging
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from calib.metrics.bins import equal_width
from calib.metrics.ece import expected_error
from calib.metrics.inputs import checked
from calib.parameters import one_of

# Where every prediction is right, the NLL falls for ever as T goes to 0; where every one is
# wrong, as T grows. Measured temperatures of networks lie between about 0.5 and 5.
LOWEST, HIGHEST = 0.01, 100.0
# What the official repositories of focal loss, MbLS, ACLS and FeDLaS search by ECE.
GRID, BINS = [step / 10 for step in range(1, 101)], 15

log = logging.getLogger(__name__)


def fit_temperature(
    logits: Tensor, targets: Tensor, criterion: Literal["nll", "ece"] = "nll"
) -> float:
    """The temperature T that minimises the NLL, or the ECE, of softmax(logits / T).

    The NLL is convex in 1/T, so LBFGS in 1/T finds the one minimum whatever the scale of the
    logits. Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
        criterion: "nll", to convergence; or "ece" with 15 bins of equal width, over the grid
            0.1, 0.2 .. 10 and with the least T on a tie, as many official repositories choose.
    Returns:
        By the NLL, T in [0.01, 100], always positive. It is a bound, with a line in the log,
        where the NLL has no minimum in between: 0.01 if every prediction is right, 100 if the
        logits are worth nothing. It is 1 if every row of logits is constant, as T changes
        nothing then. By the ECE, a T of the grid.
    Raises:
        ValueError: see `calib.metrics.inputs.checked`.
        InputError: another criterion.

    Source: Guo et al. 2017, section 4.2.
    """
    one_of("criterion", criterion, ("nll", "ece"))
    logits, targets = checked(logits, targets)
    if criterion == "ece":
        return _ece_temperature(logits, targets)
    temperature = nll_temperature(logits, targets)
    if temperature in (LOWEST, HIGHEST):
        text = "the NLL has no minimum for T in [%g, %g]: T = %g"
        log.warning(text, LOWEST, HIGHEST, temperature)
    return temperature


def nll_temperature(logits: Tensor, targets: Tensor) -> float:
    """What `fit_temperature` finds by the NLL, without a word, from checked logits and targets."""
    # Softmax ignores a shift of its row; without it, large logits would cost digits.
    logits = logits - logits.amax(1, keepdim=True)
    spread = -logits.mean().item()
    if spread == 0:
        return 1.0
    if _slope(logits, targets, 1 / LOWEST) <= 0:
        return LOWEST
    if _slope(logits, targets, 1 / HIGHEST) >= 0:
        return HIGHEST
    # With logits of unit spread one step size and one tolerance fit all.
    return spread / _best_inverse(logits / spread, targets)


def _ece_temperature(logits: Tensor, targets: Tensor) -> float:
    highest, predicted = logits.max(1)
    below, correct = logits - highest[:, None], (predicted == targets).double()

    def error(temperature: float) -> float:
        confidence = 1 / (below / temperature).exp().sum(1)
        return expected_error(equal_width(confidence, correct, BINS))

    return min(GRID, key=error)


def _slope(logits: Tensor, targets: Tensor, inverse: float) -> float:
    """Derivative of the NLL by 1/T: mean of E_p[z] - z_y."""
    expected = ((logits * inverse).softmax(1) * logits).sum(1)
    return (expected - logits.gather(1, targets[:, None])[:, 0]).mean().item()


def _best_inverse(logits: Tensor, targets: Tensor) -> float:
    inverse = torch.ones((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [inverse],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = functional.cross_entropy(logits * inverse, targets)
        loss.backward()
        return loss

    optimiser.step(closure)
    return inverse.item()
