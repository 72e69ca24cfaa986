"""Base classes of losses; cross-entropy and Brier loss; losses on mixed images."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from semix.calib.config.loss import BrierConfig, CrossEntropyConfig


@dataclass(frozen=True)
class Outputs:
    """Outputs for all unaugmented images of a split, in eval mode; equal in every process."""

    logits: Tensor  # [N, K] float32
    features: Tensor  # [N, D]
    targets: Tensor  # [N] int64


class Feedback(Protocol):
    """Runs the network on request, at most once per epoch and split."""

    def outputs(self, split: Literal["train", "validation"]) -> Outputs: ...


class RealLoss(nn.Module):
    """A module from a batch to a scalar, with or without parameters and buffers.

    Its parameters are in the optimiser, its state in the checkpoint.
    """

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Mean loss of the batch.

        Args:
            logits: [N, K] float, before softmax.
            targets: [N] int64, class numbers.
            features: [N, D] float, what the last linear layer sees.
            indices: [N] int64, each sample's index in the training set.
        Returns:
            A float32 scalar.
        """
        raise NotImplementedError

    def pop_diagnostics(self) -> dict[str, float | None]:
        """Measures that show whether the loss works, over training batches since the last call."""
        return {}

    def end_epoch(self, feedback: Feedback) -> None:
        """Called after every training epoch, in every process; most losses do nothing here."""


def gather_rows(values: Tensor, *, training: bool) -> Tensor:
    """Gather [n, ...] of each process into [P n, ...] of all P, in the order of their ranks.

    Every process computes the same loss from the same rows; the gradient reaches only the rows of
    the process, times P. The mean over processes, which data-parallel training takes, is then the
    gradient that one process with the whole batch would have.

    Args:
        values: of equal shape in every process.
        training: mode of the loss. In eval mode processes may hold the same samples, or only one
            of them may call, so nothing is gathered.
    """
    if not training or not distributed.is_available() or not distributed.is_initialized():
        return values
    return _GatherRows.apply(values)


def sum_over_processes(values: Tensor) -> Tensor:
    """Sum values over all processes, in place; every process must call."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(values)
    return values


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        processes = distributed.get_world_size()
        gathered = [torch.empty_like(values) for _ in range(processes)]
        distributed.all_gather(gathered, values.contiguous())
        start = distributed.get_rank() * len(values)
        ctx.rows, ctx.processes = slice(start, start + len(values)), processes
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0][ctx.rows] * ctx.processes


def batch_statistics(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and unbiased standard deviation of [N] values, each a float64 scalar.

    With torch.distributed running they cover the batches of all processes, so every process must
    call. The deviation of fewer than two values is 0.
    """
    values = values.double()  # sums of squares lose digits in float32
    sums = torch.stack([values.new_full((), len(values)), values.sum(), values.square().sum()])
    count, total, squares = sum_over_processes(sums)
    mean = total / count
    variance = (squares - count * mean.square()) / (count - 1).clamp(min=1)
    return count, mean, variance.clamp(min=0).sqrt()


class BatchLoss(RealLoss):
    """A loss of logits and targets only, in float32 whatever the precision of the logits."""

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        return self.of_batch(logits.float(), targets)

    def of_batch(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of the batch, a float32 scalar.

        Args:
            logits: [N, K] float32.
            targets: [N] int64.
        """
        raise NotImplementedError


class PointwiseLoss(BatchLoss):
    """The mean over the batch of `per_sample`.

    Official code of several of these losses sums over the batch instead; with a mean the learning
    rate need not change with the batch size.
    """

    def of_batch(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.per_sample(logits, targets).mean()

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, [N] float32; arguments as for `of_batch`."""
        raise NotImplementedError


def log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """log p_y of each sample, [N], from logits [N, K] and targets [N]."""
    return logits.log_softmax(1).gather(1, targets[:, None])[:, 0]


class CrossEntropy(BatchLoss):
    """The mean over the batch of -log p_y."""

    def __init__(self, num_classes: int, settings: CrossEntropyConfig) -> None:
        super().__init__()

    def of_batch(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets)


class Brier(PointwiseLoss):
    """sum_k (p_k - onehot_k)^2, in [0, 2], averaged over the batch.

    Source: Brier 1950; as a training loss in Mukhoti et al. 2020, whose code agrees.
    """

    def __init__(self, num_classes: int, settings: BrierConfig) -> None:
        super().__init__()

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        label = functional.one_hot(targets, logits.shape[1])
        return (logits.softmax(1) - label).square().sum(1)


def squared_error(logits: Tensor, soft_labels: Tensor) -> Tensor:
    """Mean over n of sum_k (p_nk - y_nk)^2: a sum over classes, not a mean.

    Its gradient is bounded, unlike that of cross-entropy.

    Args:
        logits: [N, K] float, before softmax.
        soft_labels: [N, K] float, rows that sum to 1.
    Returns:
        A float32 scalar in [0, 2].
    Raises:
        ValueError: the shapes differ.

    Source: Calibration-aware Semantic Mixing (arXiv 2504.13548), as in its official code.
    """
    _check_shapes(logits, soft_labels)
    return (logits.float().softmax(1) - soft_labels.float()).square().sum(1).mean()


def soft_cross_entropy(logits: Tensor, soft_labels: Tensor) -> Tensor:
    """Mean over n of -sum_k y_nk log p_nk, a float32 scalar; arguments as for `squared_error`."""
    _check_shapes(logits, soft_labels)
    return functional.cross_entropy(logits.float(), soft_labels.float())


def _check_shapes(logits: Tensor, soft_labels: Tensor) -> None:
    if logits.shape != soft_labels.shape or logits.ndim != 2:
        shapes = f"{tuple(logits.shape)} and {tuple(soft_labels.shape)}"
        raise ValueError(f"logits and soft_labels have shapes {shapes}: give both as [N, K]")
