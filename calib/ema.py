"""Weights averaged over the steps by an exponential moving average."""

from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

AVERAGED = ("running_mean", "running_var")  # statistics, which go with the weights they are of


class WeightAverage:
    """A copy of a network whose weights are average <- decay average + (1 - decay) weights.

    The first step's weights begin it. Batch norms' statistics are averaged likewise; every other
    buffer is the network's own at the end of each epoch.

    Args:
        decay: in (0, 1).
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.model = AveragedModel(network)
        self.model.requires_grad_(False)
        self._average = get_ema_multi_avg_fn(decay)

    @property
    def network(self) -> nn.Module:
        return self.model.module

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Called after every step of the optimiser."""
        # Not its update_parameters, which sends the number of steps to the device and waits.
        own, new = _floating(self.network), _floating(network)
        if self.model.n_averaged == 0:  # on the CPU, wherever the network is
            for average, value in zip(own, new, strict=True):
                average.copy_(value)
        else:
            self._average(own, new, self.model.n_averaged)
        self.model.n_averaged += 1

    @torch.no_grad()
    def copy_buffers(self, network: nn.Module) -> None:
        """Take over, at the end of an epoch, what is no statistic: counters, chosen numbers."""
        own = dict(self.network.named_buffers())
        for name, buffer in network.named_buffers():
            if name.rpartition(".")[2] not in AVERAGED:
                own[name].copy_(buffer)


def _floating(module: nn.Module) -> list[Tensor]:
    found = chain(module.parameters(), module.buffers())
    return [tensor for tensor in found if tensor.is_floating_point()]
