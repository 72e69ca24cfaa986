"""Batch norms where real and mixed images pass in turn: whose statistics, by policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

Policy = Literal["shared", "eval_on_mixed", "separate"]


def adopt_policy(network: nn.Module, policy: Policy) -> None:
    """Make a fresh network ready for a policy; its state keeps the names it has without."""


@contextmanager
def mixed_pass(network: nn.Module, policy: Policy) -> Iterator[None]:
    """While it lasts, batch norms treat what passes as mixed images."""
    yield
