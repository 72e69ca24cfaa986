"""The forward pass of training: compiled where wanted, apart from the network it runs."""

import os
import shutil

import torch
from torch import Tensor, nn

from data.errors import InputError
from data.machine import keep_compiled_to_ourselves


class TrainingForward(nn.Module):
    """Runs a network in training.

    What accelerate prepares gets a forward of another precision, and what torch compiles another
    class. Around the network rather than in it, both leave the names of its state, its copies and
    its measuring in float32 alone.

    Raises:
        InputError: there is no folder for what is compiled.
    """

    def __init__(self, network: nn.Module, *, compiled: bool) -> None:
        super().__init__()
        if compiled:
            keep_compiled_to_ourselves()
        # Real and mixed images come in batches of two sizes, each worth a program of its own.
        self.network = torch.compile(network, dynamic=False) if compiled else network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 or float [N, S, S, 3] to logits [N, K] and features [N, D]."""
        logits, features = self.network(images)
        return logits, features


def check_compiler(device: torch.device) -> None:
    """Raises InputError if torch.compile lacks the compiler that it calls for this device."""
    variable, program = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc")
    wanted = os.environ.get(variable, program)
    if shutil.which(wanted) is None:
        remedy = f"needs the compiler {wanted}, which is not there; install it, name another in "
        raise InputError("compile", True, f"{remedy}{variable}, or leave compile off")
