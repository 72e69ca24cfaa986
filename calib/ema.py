"""Weights averaged over the steps by an exponential moving average."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

AVERAGED = ("running_mean", "running_var")  # statistics, which go with the weights they are of


class WeightAverage:
    """A copy of a network whose weights are average <- decay average + (1 - decay) weights.

    The first step's weights begin it. Batch norms' statistics are averaged likewise; every other
    buffer is the network's own.

    Args:
        decay: in (0, 1).
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.model = AveragedModel(
            network, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True
        )
        self.model.requires_grad_(False)

    @property
    def network(self) -> nn.Module:
        return self.model.module

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Called after every step of the optimiser."""
        self.model.update_parameters(network)

    @torch.no_grad()
    def copy_buffers(self, network: nn.Module) -> None:
        """Take over, at the end of an epoch, what is no statistic: counters, chosen numbers."""
        own = dict(self.network.named_buffers())
        for name, buffer in network.named_buffers():
            if name.rpartition(".")[2] not in AVERAGED:
                own[name].copy_(buffer)
