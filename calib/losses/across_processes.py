"""Batches of every process together, for losses that look at a batch as a whole."""

from typing import Any

import torch
from torch import Tensor, distributed


def all_rows(values: Tensor, *, training: bool) -> Tensor:
    """[n, ...] of each process to the [P n, ...] of all P, in the order of their ranks.

    Every process computes the same loss from the same rows; the gradient reaches its own rows
    alone, times P. The mean over processes, which data-parallel training takes, is then the
    gradient that one process with the whole batch would have.

    Args:
        values: of equal shape in every process.
        training: of the loss. Out of training processes may hold the same samples, or one of
            them may be alone, so the rows remain its own.
    """
    if not training or not distributed.is_available() or not distributed.is_initialized():
        return values
    return _AllRows.apply(values)


def add_up(values: Tensor) -> Tensor:
    """The sum of what all processes hold, in place; every one of them must call."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(values)
    return values


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        processes = distributed.get_world_size()
        parts = [torch.empty_like(values) for _ in range(processes)]
        distributed.all_gather(parts, values.contiguous())
        first = distributed.get_rank() * len(values)
        ctx.own, ctx.processes = slice(first, first + len(values)), processes
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0][ctx.own] * ctx.processes
