"""Memory of the machine and of each GPU against the weights, and memory that processes share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from flows.cgroup import MemoryLimit, memory_limit
from flows.costs import amount
from flows.doctor.finding import FAILED, OK, WARNING, Finding
from flows.doctor.model_files import places, weights
from flows.doctor.subject import Subject

SHARED = Path("/dev/shm")
LEAST_SHARED = 256e6  # bytes; batches of images pass through it, and containers get 64 MB
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
AIR = 1.5  # times the weights: a batch of one image fits beside them


def check(subject: Subject) -> Iterator[Finding]:
    needed = _needed(subject)
    free, where = available(memory_limit())
    yield judged("memory", free, needed, where=where)
    yield from _gpus(needed)
    if SHARED.is_dir():
        free = shutil.disk_usage(SHARED).free
        short, remedy = free < LEAST_SHARED, "in a container: docker run --shm-size=1g"
        state = WARNING if short else OK
        yield Finding("shared memory", state, f"{amount(free)} free", remedy if short else "")


def available(limit: MemoryLimit | None) -> tuple[float, str]:
    """Bytes that can be had, and where."""
    free = psutil.virtual_memory().available
    if limit is None or limit.left >= free:
        return free, "free"
    return limit.left, f"left of the limit of {amount(limit.limit)} (cgroup)"


def _needed(subject: Subject) -> float | None:
    """Bytes of a build's weights in the precision that they run in; None if not known."""
    if subject.build is None:
        return None
    try:
        found = [weights(path) if path else {} for _, path in places(subject).values()]
    except Exception:  # what is wrong with them is said with the models
        return None
    if not all(found):  # a model that is not here yet
        return None
    return BYTES[subject.dtype] * sum(sum(files.values()) for files in found)


def _gpus(needed: float | None) -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield judged(f"memory of cuda:{index}", torch.cuda.mem_get_info(index)[0], needed)


def judged(name: str, free: float, needed: float | None, *, where: str = "free") -> Finding:
    """Free bytes against those that weights take."""
    found = f"{amount(free)} {where}"
    if needed is None:
        return Finding(name, OK, found)
    found = f"{found}, the weights take {amount(needed)}"
    if free < needed:
        remedy = "end what else uses it, choose a smaller model or a device with more"
        return Finding(name, FAILED, found, remedy)
    if free < AIR * needed:
        return Finding(name, WARNING, found, "little is left for batches; make them small")
    return Finding(name, OK, found)
