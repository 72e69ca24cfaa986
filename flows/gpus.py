"""GPUs as NVIDIA's driver tells of them, asked without importing torch."""

import os
import re
import shutil
import signal
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeVar

from semix.data.errors import InputError
from semix.flows.child import StopSignal, python_module, supervise

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
ANSWER_S = 60.0  # of nvidia-smi, which first wakes the GPUs
# Its exit statuses: no GPU for this process, as in some jobs; a warning about a part of a GPU.
NO_DEVICE, INFOROM = 6, 14
DEVICES = Path("/dev")  # where each GPU has a file
BROKEN = 3  # exit status of semix.data.device where the GPU does not work
PROBE_S = 900.0  # of a probe, which first imports torch from a file system that may be slow
Name = TypeVar("Name", bound=str)
GPU = re.compile(r"\d+|(GPU|MIG)-.*")  # as CUDA reads CUDA_VISIBLE_DEVICES, up to anything else


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Identifiers as CUDA_VISIBLE_DEVICES takes them; empty without a GPU.

    Args:
        environment: of the process that is meant.
    Raises:
        InputError: nothing was chosen, and the driver does not work: there may be GPUs.
    """
    chosen = environment.get(VISIBLE_DEVICES)
    if chosen is not None:
        return list(takewhile(GPU.fullmatch, map(str.strip, chosen.split(","))))
    return list(driver_gpus())


@cache  # waking the GPUs takes seconds; a fault is not kept, for the driver may be mended
def driver_gpus() -> tuple[str, ...]:
    """Numbers of all GPUs, asked once a process. Raises InputError, as `visible_gpus`."""
    lines, fault = ask_driver("index")
    # Where one of several GPUs is lost, a line may say so instead of its number.
    if fault := fault or next((line for line in lines if not line.isdecimal()), ""):
        remedy = (
            f"nvidia-smi cannot say which GPUs there are ({fault}); mend NVIDIA's driver, or set "
            "this to the GPUs to use, or to nothing, for the CPU"
        )
        raise InputError(VISIBLE_DEVICES, "unset", remedy)
    return tuple(lines)


def settled_device(
    device: Name, environment: Mapping[str, str] = os.environ
) -> Name | Literal["cuda"]:
    """auto is cuda for a process that has a GPU: it would go on without a lost one on the CPU.

    Raises InputError: as of `visible_gpus`.
    """
    return "cuda" if device == "auto" and visible_gpus(environment) else device


def ask_driver(query: str) -> tuple[list[str], str]:
    """A line a GPU, and what is wrong with the driver; both empty without one.

    Args:
        query: fields as nvidia-smi names them.
    """
    program, lines = shutil.which("nvidia-smi"), list[str]()
    if program is None:
        return [], "there is no nvidia-smi, and there is a GPU" if has_gpu_file() else ""
    command = [program, f"--query-gpu={query}", "--format=csv,noheader"]
    outcome = supervise(command, on_line=lines.append, limit_s=ANSWER_S)
    if outcome.hung or outcome.stuck:
        return [], f"no answer within {ANSWER_S:.0f} s"
    if outcome.returncode in (0, INFOROM):
        return [line for line in lines if line and not line.startswith("WARNING")], ""
    complaint = next((line for line in lines if line and not line.isdecimal()), str(outcome))
    return [], "" if outcome.returncode == NO_DEVICE and not has_gpu_file() else complaint


def has_gpu_file() -> bool:
    """Whether a GPU is ours, even if it does not work; what may not be opened is another job's."""
    for path in DEVICES.glob("nvidia[0-9]*"):
        try:
            os.close(os.open(path, os.O_RDWR))
        except PermissionError:
            continue
        except OSError:
            return True
        return True
    return False


def gpu_fault(environment: Mapping[str, str], stop: StopSignal) -> str:
    """What a process of its own finds wrong with the first GPU that it sees.

    Args:
        environment: changes to our own.
    Returns:
        Empty if the GPU works, or cannot be asked: where torch itself cannot be read, say.
    """
    probe, lines = python_module("semix.data.device"), list[str]()
    try:
        outcome = supervise(
            probe, on_line=lines.append, environment=environment, stop=stop, limit_s=PROBE_S
        )
    except OSError:
        return ""
    if outcome.stuck or outcome.returncode == -signal.SIGALRM:
        return "it does not answer"
    return lines[-1] if outcome.returncode == BROKEN and lines else ""
