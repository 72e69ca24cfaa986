"""What processes that train one model together must agree on."""

import itertools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import distributed, nn

if TYPE_CHECKING:
    from accelerate import Accelerator

LONGEST_PAUSE_S = 0.5  # between two looks of who waits
_waits = itertools.count()  # alike in all processes, which wait equally often


def leave_group() -> None:
    """End the process group, if there is one; called in every process, with no exchange open.

    Left to the interpreter's end, gloo's threads now and then abort a process that had finished.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def wait_for_all(accelerator: "Accelerator") -> None:
    """Wait until every process has come here, however long one of them works alone.

    A collective kills who waits in it for longer than the group's time limit, 10 minutes with
    NCCL: less than measuring in the main process, or a slow disk, may take. And nothing asks for
    a signal there. So whoever is early looks into the store through which the group was made.
    """
    if accelerator.num_processes == 1:
        return
    store, key = distributed.distributed_c10d._get_default_store(), f"semix/wait-{next(_waits)}"
    store.add(key, 1)
    pause = 1e-3
    while store.add(key, 0) < accelerator.num_processes:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    accelerator.wait_for_everyone()  # the process that serves the store may end after this


def share_gradients(parameters: Iterable[nn.Parameter], accelerator: "Accelerator") -> None:
    """Average the gradients of parameters that no wrapper of accelerate looks after."""
    if accelerator.num_processes > 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")


def share_buffers(module: nn.Module, accelerator: "Accelerator") -> None:
    """Average the batch norms' statistics, of which each process has its own."""
    if accelerator.num_processes > 1:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.copy_(accelerator.reduce(buffer, reduction="mean"))
