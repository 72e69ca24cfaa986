"""What all post-hoc calibrators share: how they are applied and stored, and their optimiser."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from semix.calib.metrics.one_pass import validated_float64
from semix.calib.temperature import nll_temperature


class Calibrator(ABC):
    """A map of logits, fitted on validation images; a frozen dataclass of numbers and tensors."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Calibrated logits or log probabilities, float64 [N, K] on the CPU, of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes than those of the fit.
        """
        if self.num_classes is not None:
            require_same_classes(logits, self.num_classes)
        return self.transform(logits.detach().cpu().double())

    @property
    def num_classes(self) -> int | None:
        """K of the fit; None takes any."""
        return None

    @abstractmethod
    def transform(self, logits: Tensor) -> Tensor:
        """The map, of operations of torch alone, in the precision and on the device of `logits`.

        It can be exported; the tensors of `self` must have that precision, see `to`.
        """

    def to(self, dtype: torch.dtype) -> Self:
        """The same calibrator with all tensors of this precision."""
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return type(self)(**{name: _cast(getattr(self, name), dtype) for name in names})

    def state(self) -> dict[str, Any]:
        """The fields as values for JSON, from which `from_state` makes the same calibrator."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The calibrator with this state; lists become float64 tensors.

        Raises:
            TypeError, ValueError: the state is that of another calibrator, or damaged.
        """
        return cls(**{name: _restored(value) for name, value in state.items()})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(each, dtype) for each in value)
    return value.to(dtype) if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, Tensor | np.ndarray) else value


def _restored(value: Any) -> Any:
    return as_tensor(value) if isinstance(value, list) else value


def as_tensor(values: list[Any]) -> Tensor:
    """A stored tensor, float64."""
    return torch.tensor(values, dtype=torch.float64)


def temperature_of(logits: Tensor, targets: Tensor, temperature: float | None) -> float:
    if temperature is not None:
        return temperature
    return nll_temperature(*validated_float64(logits, targets))


def require_same_classes(logits: Tensor, classes: int) -> None:
    """Raise ValueError for logits that are not [N, classes]."""
    if logits.ndim != 2 or logits.shape[1] != classes:
        text = f"logits have shape {tuple(logits.shape)}"
        raise ValueError(f"{text}: fitted on [N, {classes}]")


def minimise(
    loss: Callable[[Tensor], Tensor], start: Tensor, *, gradient: float, change: float
) -> Tensor:
    """Minimise a smooth convex function by LBFGS from `start`; returns where the minimum is.

    Args:
        gradient: stop when the largest entry of the gradient is below this.
        change: stop when a step changes the loss or the position by less than this.
    """
    factors = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [factors],
        max_iter=2000,
        history_size=50,
        tolerance_grad=gradient,
        tolerance_change=change,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(factors)
        value.backward()
        return value

    optimiser.step(closure)
    return factors.detach()
