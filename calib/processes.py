"""Coordinates processes that train one model: waiting, broadcasts, averages, votes to stop."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import distributed, nn

from semix.calib.stopping import ShouldStop
from semix.data.errors import InputError
from semix.data.printable import OncePerRun

T = TypeVar("T")
VOTE_INTERVAL_S = 1.0  # longest wait of a request to stop, plus a step; a vote costs far less
MAX_POLL_S = 0.5  # longest pause between two polls of a waiting process
_waits = itertools.count()  # equal in all processes, which wait equally often


def log_from_main_process() -> None:
    """Send our warnings to standard error: from the main process only, and each kind once."""
    main = os.environ.get("RANK", "0") == "0"  # set by torchrun, before the process group exists
    handler = logging.StreamHandler() if main else logging.NullHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.addFilter(OncePerRun())
    logging.getLogger("semix").handlers = [handler]


def leave_group() -> None:
    """End the process group, if any; called in every process, with no collective pending.

    Otherwise gloo's threads now and then abort a finished process when the interpreter ends.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def wait_for_all(accelerator: Accelerator) -> None:
    """Wait until every process arrives, however long one of them works alone.

    A collective kills a process that waits longer than the group's time limit, 10 minutes with
    NCCL: measuring in the main process, or a slow disk, may take longer. Nor does a collective
    react to signals. So processes that are early poll the store that the group was made with.
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
    """Call `ask` in the main process and return its result, or raise its InputError, in all.

    Every process must call. On other machines files may appear later: processes that decided by
    their own disk would wait for each other at different places.
    """
    if accelerator is None or accelerator.num_processes == 1:
        return ask()
    answer: T | InputError | None = None
    if accelerator.is_main_process:
        try:
            answer = ask()
        except InputError as refused:  # raised in all processes, each with its exit status
            answer = refused
    wait_for_all(accelerator)  # asking may take longer than the time limit of a broadcast
    result: T | InputError = broadcast_object_list([answer])[0]
    if isinstance(result, InputError):
        raise result
    return result


def average_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Average the gradients of parameters that accelerate has not wrapped."""
    if accelerator.num_processes > 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")


def average_buffers(module: nn.Module, accelerator: Accelerator) -> None:
    """Average the batch norms' statistics, which differ between processes."""
    if accelerator.num_processes > 1:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.copy_(accelerator.reduce(buffer, reduction="mean"))


class StopVote:
    """Whether any process was asked to stop: called after every step, with one answer for all.

    Several processes must exchange their answers, which waits for the slowest one and for the
    device; so they vote once per VOTE_INTERVAL_S, and count anew how many steps that are.

    Args:
        asked: whether this process was asked to stop.
    """

    def __init__(self, asked: ShouldStop, accelerator: Accelerator) -> None:
        self.asked, self.accelerator = asked, accelerator
        self.every = 1  # steps between two votes
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
        ballot = torch.tensor([[float(self.asked()), seconds]], device=self.accelerator.device)
        # The same two numbers in every process, so that all vote again after the same step.
        asked, slowest = self.accelerator.gather(ballot).amax(0).tolist()
        if self._steps:
            steps = int(VOTE_INTERVAL_S * self._steps / max(slowest, 1e-6))
            self.every = min(max(1, steps), 2 * self.every)  # a single step may be unusually quick
        self._steps, self._since = 0, time.monotonic()
        return bool(asked)
