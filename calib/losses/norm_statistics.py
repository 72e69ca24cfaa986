"""A running mean and standard deviation of feature norms, over every process."""

import torch
from torch import Tensor

from calib.losses.across_processes import add_up


def batch_statistics(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and unbiased standard deviation of [N] values, each a float64 scalar.

    With torch.distributed running they are those of the batches of all processes together, so
    every process must call it. The deviation of fewer than two values is 0.
    """
    values = values.double()  # sums of squares lose digits in float32
    sums = torch.stack([values.new_full((), len(values)), values.sum(), values.square().sum()])
    count, total, squares = add_up(sums)
    mean = total / count
    variance = (squares - count * mean.square()) / (count - 1).clamp(min=1)
    return count, mean, variance.clamp(min=0).sqrt()
