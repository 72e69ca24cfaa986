"""A place for slots: how one is started there, how many there are, and what ends them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefect.futures import PrefectFuture
from prefect.tasks import Task

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
