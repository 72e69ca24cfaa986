"""What processes that train one model together must agree on."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from semix.calib.stopping import ShouldStop
from semix.data.errors import InputError
from semix.data.printable import OncePerRun
from torch import distributed, nn

T = TypeVar("T")
VOTE_INTERVAL_S = (
    1.0  # a request to stop waits so long at most, and a step more; a look costs far less
)
MAX_POLL_S = 0.5  # between two looks of who waits
_waits = itertools.count()  # alike in all processes, which wait equally often


def warn_once() -> None:
    """Send our warnings to standard error: of the main process alone, and each kind once."""
    main = os.environ.get("RANK", "0") == "0"  # as torchrun numbers processes, before they meet
    handler = logging.StreamHandler() if main else logging.NullHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.addFilter(OncePerRun())
    logging.getLogger("semix").handlers = [handler]


def leave_group() -> None:
    """End the process group, if there is one; called in every process, with no exchange open.

    Left to the interpreter's end, gloo's threads now and then abort a process that had finished.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def wait_for_all(accelerator: Accelerator) -> None:
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
        pause = min(2 * pause, MAX_POLL_S)
    accelerator.wait_for_everyone()  # the process that serves the store may end after this


def broadcast_from_main(ask: Callable[[], T], accelerator: Accelerator | None) -> T:
    """What the main process finds, in every process: files come later to other machines.

    All must call; who went by its own disk would wait where nobody comes.
    """
    if accelerator is None or accelerator.num_processes == 1:
        return ask()
    found: T | InputError | None = None
    if accelerator.is_main_process:
        try:
            found = ask()
        except InputError as refused:  # all refuse, each with the status of a refusal
            found = refused
    wait_for_all(accelerator)  # asking may take longer than a broadcast is waited for
    told: T | InputError = broadcast_object_list([found])[0]
    if isinstance(told, InputError):
        raise told
    return told


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


class Vote:
    """Whether any process was asked to stop: called after every step, answered alike in all.

    A process alone just asks. Several look together, which waits for the slowest and for the
    device; so they do it once in as many steps as took LOOK_S, found anew at every look.

    Args:
        asked: whether this process was asked.
    """

    def __init__(self, asked: ShouldStop, accelerator: Accelerator) -> None:
        self.asked, self.accelerator = asked, accelerator
        self.every = 1  # steps between two looks
        self._steps, self._since = 0, time.monotonic()

    def __call__(self) -> bool:
        if self.accelerator.num_processes == 1:
            return self.asked()
        self._steps += 1
        return self._steps >= self.every and self.ask_together()

    def ask_together(self) -> bool:
        """Ask all processes now; every process must call after the same step."""
        if self.accelerator.num_processes == 1:
            return self.asked()
        seconds = time.monotonic() - self._since
        own = torch.tensor([[float(self.asked()), seconds]], device=self.accelerator.device)
        # The same two numbers in every process, so that all look again after the same step.
        asked, slowest = self.accelerator.gather(own).amax(0).tolist()
        if self._steps:
            steps = int(VOTE_INTERVAL_S * self._steps / max(slowest, 1e-6))
            self.every = min(max(1, steps), 2 * self.every)  # one quick step proves little
        self._steps, self._since = 0, time.monotonic()
        return bool(asked)
