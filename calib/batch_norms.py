"""Batch norms where real and mixed images pass in turn: whose statistics, by policy."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from data.errors import InputError

Policy = Literal["shared", "eval_on_mixed", "separate"]


class SeparateNorm(_BatchNorm):
    """A batch norm with a second one, `mixed`, that takes its place while mixed images pass.

    Source: Xie et al. 2020, "Adversarial Examples Improve Image Recognition", section 3.2: an
    auxiliary batch norm, affine parameters and statistics, for images of another kind.
    """

    mixed: nn.Module
    on_mixed = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mixed(x) if self.on_mixed else super().forward(x)
        return found


def adopt_policy(network: nn.Module, policy: Policy) -> None:
    """Make a fresh network ready for a policy; its state keeps the names it has without.

    "separate" adds to every batch norm a copy of it, under its name and `.mixed`. Inference
    never uses these.

    Raises:
        InputError: another policy than "shared" for a network without batch norms.
    """
    norms = _norms(network)
    if policy != "shared" and not norms:
        remedy = "the model has no batch norms; leave it at shared"
        raise InputError("mixed.batch_norm", policy, remedy)
    if policy == "separate":
        kinds = {kind: _separate_kind(kind) for kind in map(type, norms)}
        for norm in norms:
            norm.mixed = copy.deepcopy(norm)
            # In place, whatever kind of batch norm it is: its owner holds on to this object.
            norm.__class__ = kinds[type(norm)]


@contextmanager
def mixed_pass(network: nn.Module, policy: Policy) -> Iterator[None]:
    """While it lasts, batch norms treat what passes as mixed images.

    "shared": as they treat real ones. "eval_on_mixed": by their running statistics, which stay
    as they are. "separate": by the second batch norms that `adopt_policy` has added.
    """
    norms = _norms(network)
    training = [norm.training for norm in norms]
    try:
        for norm in norms:
            if policy == "eval_on_mixed":
                norm.training = False
            elif policy == "separate" and isinstance(norm, SeparateNorm):
                norm.on_mixed = True
        yield
    finally:
        for norm, before in zip(norms, training, strict=True):
            norm.training = before
            if isinstance(norm, SeparateNorm):
                norm.on_mixed = False


def _norms(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def _separate_kind(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"Separate{kind.__name__}", (SeparateNorm, kind), {})
