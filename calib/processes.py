"""Coordinate the processes that train one model: waiting, broadcasts, averages, votes to stop."""

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
VOTE_INTERVAL_S = 1.0  # a request to stop waits at most so long, plus a step
MAX_POLL_S = 0.5  # longest pause between two polls of a waiting process
_waits = itertools.count()  # numbers the waits; the same in all processes, which wait equally often


def log_from_main_process() -> None:
    """Send warnings of semix to standard error, from the main process only, each kind once."""
    main = os.environ.get("RANK", "0") == "0"  # set by torchrun, before the process group exists
    handler = logging.StreamHandler() if main else logging.NullHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.addFilter(OncePerRun())
    logging.getLogger("semix").handlers = [handler]


def leave_group() -> None:
    """End the process group, if any; called in every process, when no collective is running.

    Without this, gloo's threads sometimes abort a finished process when the interpreter exits.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def wait_for_all(accelerator: Accelerator) -> None:
    """Wait until every process has called this, for any length of time.

    A collective ends a process that waits longer than the group's time limit, 10 minutes with NCCL,
    but the main process may measure, or a disk be slow, for longer. A collective also ignores
    signals. So waiting processes poll the store with which the group was made.
    """
    if accelerator.num_processes == 1:
        return
    store, key = distributed.distributed_c10d._get_default_store(), f"semix/wait-{next(_waits)}"
    store.add(key, 1)
    pause = 1e-3
    while store.add(key, 0) < accelerator.num_processes:
        time.sleep(pause)
        pause = min(2 * pause, MAX_POLL_S)
    accelerator.wait_for_everyone()  # after this, the process that serves the store may end


def broadcast_from_main(function: Callable[[], T], accelerator: Accelerator | None) -> T:
    """Call `function` in the main process and return its result, or raise its InputError, in all.

    Every process must call this. Files may appear later on other machines, so that processes which
    look for themselves could decide differently, and would then wait for each other forever.
    """
    if accelerator is None or accelerator.num_processes == 1:
        return function()
    outcome: T | InputError | None = None
    if accelerator.is_main_process:
        try:
            outcome = function()
        except InputError as error:  # raised below, so that all processes exit with its status
            outcome = error
    wait_for_all(accelerator)  # the call may take longer than the time limit of a broadcast
    result: T | InputError = broadcast_object_list([outcome])[0]
    if isinstance(result, InputError):
        raise result
    return result


def average_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Average over processes the gradients of parameters that accelerate has not wrapped."""
    if accelerator.num_processes > 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")


def average_buffers(module: nn.Module, accelerator: Accelerator) -> None:
    """Average over processes the statistics of batch norms."""
    if accelerator.num_processes > 1:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.copy_(accelerator.reduce(buffer, reduction="mean"))


class StopVote:
    """Called after every step; returns in all processes whether any of them was asked to stop.

    The processes must exchange this information, for which they wait for the slowest process and
    for the device. So they do it once per VOTE_INTERVAL_S, and estimate after each vote how many
    steps that is.

    Args:
        should_stop: whether this process was asked to stop.
    """

    def __init__(self, should_stop: ShouldStop, accelerator: Accelerator) -> None:
        self.should_stop, self.accelerator = should_stop, accelerator
        self.interval = 1  # steps between two votes
        self._steps, self._since = 0, time.monotonic()

    def __call__(self) -> bool:
        if self.accelerator.num_processes == 1:
            return self.should_stop()
        self._steps += 1
        return self._steps >= self.interval and self.vote()

    def vote(self) -> bool:
        """Vote now; every process must call this after the same step."""
        if self.accelerator.num_processes == 1:
            return self.should_stop()
        seconds = time.monotonic() - self._since
        ballot = torch.tensor(
            [[float(self.should_stop()), seconds]], device=self.accelerator.device
        )
        # Every process gets the same two numbers, so that all vote again after the same step.
        should_stop, slowest = self.accelerator.gather(ballot).amax(0).tolist()
        if self._steps:
            steps = int(VOTE_INTERVAL_S * self._steps / max(slowest, 1e-6))
            self.interval = min(max(1, steps), 2 * self.interval)  # one step may be unusually fast
        self._steps, self._since = 0, time.monotonic()
        return bool(should_stop)
