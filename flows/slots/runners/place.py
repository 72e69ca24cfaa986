"""A place for slots: how one is started there, how many there are, and what ends them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect.futures import PrefectFuture
from prefect.tasks import Task

from flows.cgroup import usable_cores
from flows.gpus import CHOSEN
from flows.supervise import Stop

Record = dict[str, Any]
SlotFuture = PrefectFuture[Record]


@dataclass(frozen=True)
class Place:
    """Slots that can be started now.

    Attributes:
        submit: start a task with these parameters in one of them.
        count: how many slots there are.
        environment: of a slot's worker, changes to that of the process that supervises it.
        stop: handed to each slot.
        end: sets `stop`.
    """

    submit: Callable[[Task[..., Record], dict[str, Any]], SlotFuture]
    count: int
    environment: Callable[[int], Mapping[str, str]]
    stop: Stop
    end: Callable[[], None]


def quiet() -> dict[str, str]:
    """No bars as lines in a log."""
    return {"TQDM_DISABLE": "1"}


def own_gpu(slot: int, gpus: Sequence[str]) -> dict[str, str]:
    """Slots take turns at the GPUs."""
    return {CHOSEN: gpus[slot % len(gpus)]} if gpus else {}


def shared_threads(count: int) -> dict[str, str]:
    """For `count` workers of this machine: together no more threads than cores we may use.

    A few too many cost ten times, not a few per cent.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // count))
    return {"OMP_NUM_THREADS": threads}
