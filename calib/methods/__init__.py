"""Training methods by name: what becomes of a batch of real images before the loss."""

from typing import Any

from calib.methods.base import Forward, Method, Outcome, Plain
from calib.parameters import choose, construct

__all__ = ["Forward", "Method", "Outcome", "build_method"]

METHODS: dict[str, type[Method]] = {"plain": Plain}


def build_method(name: str, num_classes: int, **params: Any) -> Method:
    """A training method, called as `(network, batch, loss)`.

    Raises:
        InputError: an unknown name or parameter, or a value out of range.
    """
    return construct(
        choose(METHODS, name, field="method.name"), num_classes, params=params, field="method"
    )
