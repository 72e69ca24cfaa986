"""Vector scaling: a weight and a bias for each class's logit."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from calib.metrics.inputs import checked
from calib.posthoc.temperature import nll_temperature

# Of the squared distance from temperature scaling, in units of each class's spread. It decides
# only where the data do not, as for a class without an image or one that is always right.
PENALTY = 1e-8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VectorScaling:
    """z_k w_k + b_k."""

    weight: Tensor  # w, [K] float64
    bias: Tensor  # b, [K] float64, of mean 0, as a common shift changes nothing

    def apply(self, logits: Tensor) -> Tensor:
        """Scaled logits, [N, K] float64 on the CPU, of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes.
        """
        if logits.ndim != 2 or logits.shape[1] != len(self.weight):
            found = f"logits have shape {tuple(logits.shape)}"
            raise ValueError(f"{found}: fitted on [N, {len(self.weight)}]")
        return logits.detach().cpu().double() * self.weight + self.bias

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {"weight": self.weight.tolist(), "bias": self.bias.tolist()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "VectorScaling":
        """What `as_dict` gave."""
        rows = (values["weight"], values["bias"])
        return cls(*(torch.tensor(row, dtype=torch.float64) for row in rows))


def fit_vector(logits: Tensor, targets: Tensor) -> VectorScaling:
    """The w and b that minimise the NLL of softmax(w z + b), to convergence.

    The NLL is convex, but need not have a minimum: a class without an image sends its b to minus
    infinity, separable data send w to infinity. So a penalty of 1e-8 pulls towards temperature
    scaling, too weak to be seen elsewhere; the log names the classes that it alone holds.
    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
    Raises:
        ValueError: see `calib.metrics.inputs.checked`.

    Source: Guo et al. 2017, section 4.2.
    """
    logits, targets = checked(logits, targets)
    # Columns of mean 0 and deviation 1: one step size and one penalty fit all.
    centre, spread = logits.mean(0), logits.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    standard = (logits - centre) / spread
    start = torch.stack([spread, centre]) / nll_temperature(logits, targets)
    scale, offset = _minimise(standard, targets, start)
    _report_undetermined(standard * scale + offset)
    weight = scale / spread
    bias = offset - weight * centre
    return VectorScaling(weight=weight, bias=bias - bias.mean())


def _minimise(logits: Tensor, targets: Tensor, start: Tensor) -> Tensor:
    """Scale and offset, [2, K], by LBFGS from `start`, which the penalty pulls towards."""
    factors = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [factors],
        max_iter=2000,
        history_size=50,
        tolerance_grad=1e-11,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        nll = functional.cross_entropy(logits * factors[0] + factors[1], targets)
        loss = nll + PENALTY / 2 * (factors - start).square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return factors.detach()


def _report_undetermined(logits: Tensor) -> None:
    """Log the classes whose bias the NLL does not feel: it curves by less than the penalty."""
    p = logits.softmax(1)
    curvature = (p * (1 - p)).mean(0)  # of the NLL, by b
    held = (curvature < 100 * PENALTY).nonzero()[:, 0].tolist()
    if held:
        text = "the data do not determine the vector scaling of class %s: kept near temperature"
        log.warning(text, ", ".join(map(str, held)))
