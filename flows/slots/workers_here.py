"""Worker processes of this machine: each its GPU and its share of the cores, started ahead."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flows.cgroup import usable_cores
from flows.child import started_ahead
from flows.gpus import CHOSEN, visible_gpus
from flows.slots.settings import LOCAL, SlotSettings, slots_here

# What a worker imports, sooner or later: with it torch, the models' libraries, all families.
IMPORTS = ("pipeline.shard",)


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


def environments_here(settings: SlotSettings) -> list[dict[str, str]]:
    """Of each slot of this machine: as many as were asked for, else one a visible GPU, or one."""
    gpus = [] if settings.device == "cpu" else visible_gpus()
    count = slots_here(settings)
    common = quiet() | shared_threads(count)
    return [common | own_gpu(slot, gpus) for slot in range(count)]


@contextmanager
def workers_ahead(settings: SlotSettings, *, builds: int = 1, url: str = "") -> Iterator[None]:
    """During the block, slots of this machine find their workers with all libraries imported.

    Args:
        builds: how many begin in the block, each with these slots.
        url: of the root, for whoever looks at processes.
    """
    if settings.runner != LOCAL:
        yield
        return
    environments = builds * environments_here(settings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started_ahead(IMPORTS, environments, shown=("pipeline.worker", url), **pipes):
        yield
