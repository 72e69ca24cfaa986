"""What processes that train one model together must agree on."""

from collections.abc import Iterable

from accelerate import Accelerator
from torch import distributed, nn


def leave_group() -> None:
    """End the process group, if there is one; called in every process, with no exchange open.

    Left to the interpreter's end, gloo's threads now and then abort a process that had finished.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def share_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Average the gradients of parameters that no wrapper of accelerate looks after."""
    if accelerator.num_processes > 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")


def share_buffers(module: nn.Module, accelerator: Accelerator) -> None:
    """Average the batch norms' statistics, of which each process has its own."""
    if accelerator.num_processes > 1:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.copy_(accelerator.reduce(buffer, reduction="mean"))
