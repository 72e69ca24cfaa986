"""Isotonic regression of each class's probability against the rest."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calib.metrics.inputs import checked


@dataclass(frozen=True)
class Isotonic:
    """A rising, piecewise linear map of p_k for each class, then rows that sum to 1.

    Attributes:
        knots: for each class its x and y, float64 arrays of equal length, x rising from within
            [0, 1], y not falling in [0, 1]; before the first and behind the last x, y is level.
        floor: what is put for anything smaller before the rows are made to sum to 1.
    """

    knots: tuple[tuple[np.ndarray, np.ndarray], ...]
    floor: float

    def apply(self, logits: Tensor) -> Tensor:
        """Log probabilities, [N, K] float64 on the CPU, all finite, of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes.
        """
        if logits.ndim != 2 or logits.shape[1] != len(self.knots):
            found = f"logits have shape {tuple(logits.shape)}"
            raise ValueError(f"{found}: fitted on [N, {len(self.knots)}]")
        p = logits.detach().cpu().double().softmax(1).numpy()
        mapped = [np.interp(p[:, k], x, y) for k, (x, y) in enumerate(self.knots)]
        raised = torch.from_numpy(np.stack(mapped, axis=1)).clamp(min=self.floor)
        return (raised / raised.sum(1, keepdim=True)).log()

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        knots = [{"x": x.tolist(), "y": y.tolist()} for x, y in self.knots]
        return {"knots": knots, "floor": self.floor}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Isotonic":
        """What `as_dict` gave."""
        knots = ((np.array(knot["x"]), np.array(knot["y"])) for knot in values["knots"])
        return cls(tuple(knots), values["floor"])


def fit_isotonic(logits: Tensor, targets: Tensor) -> Isotonic:
    """For each class the rising map of p_k that is least squares from 1[y = k].

    The maps give 0 below the least p_k that an image of class k had, and may give 0 for every
    class of a row. A zero that N images cannot prove is raised to 1 / (N K) before the rows are
    made to sum to 1, so that log probabilities are finite; a row of zeros becomes uniform.
    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
    Raises:
        ValueError: see `calib.metrics.inputs.checked`.

    Source: Zadrozny and Elkan 2002, one against the rest, normalised.
    """
    from sklearn.isotonic import IsotonicRegression

    logits, targets = checked(logits, targets)
    samples, classes = logits.shape
    p, labels = logits.softmax(1).numpy(), targets.numpy()
    knots = []
    for k in range(classes):
        fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        fitted.fit(p[:, k], (labels == k).astype(float))
        knots.append((fitted.X_thresholds_, fitted.y_thresholds_))
    return Isotonic(tuple(knots), floor=1 / (samples * classes))
