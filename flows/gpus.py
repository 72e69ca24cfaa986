"""GPUs that NVIDIA's driver reports, without importing torch."""

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
ANSWER_S = 60.0  # timeout of nvidia-smi, which first wakes the GPUs
# Exit statuses of nvidia-smi: no GPU for this process; a warning about the infoROM of a GPU.
NO_DEVICE, INFOROM = 6, 14
DEVICES = Path("/dev")  # where each GPU has a file
BROKEN = 3  # exit status of semix.data.device for a GPU that does not work
PROBE_S = 900.0  # timeout of a probe, which first imports torch, maybe from a slow file system
Name = TypeVar("Name", bound=str)
GPU = re.compile(r"\d+|(GPU|MIG)-.*")  # CUDA reads CUDA_VISIBLE_DEVICES up to the first other text


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Identifiers of GPUs, as in CUDA_VISIBLE_DEVICES; empty without a GPU.

    Args:
        environment: environment of the process in question.
    Raises:
        InputError: CUDA_VISIBLE_DEVICES is unset and the driver does not work: there may be GPUs.
    """
    visible = environment.get(VISIBLE_DEVICES)
    if visible is not None:
        return list(takewhile(GPU.fullmatch, map(str.strip, visible.split(","))))
    return list(driver_gpus())


@cache  # waking the GPUs takes seconds; an error is not cached, as the driver may be repaired
def driver_gpus() -> tuple[str, ...]:
    """Numbers of all GPUs, read once per process. Raises InputError as `visible_gpus`."""
    lines, fault = ask_driver("index")
    # If one of several GPUs is lost, a message may stand in place of its number.
    if fault := fault or next((line for line in lines if not line.isdecimal()), ""):
        remedy = (
            f"nvidia-smi cannot list the GPUs ({fault}); repair NVIDIA's driver, or set this to "
            "the GPUs to use, or to nothing for the CPU"
        )
        raise InputError(VISIBLE_DEVICES, "unset", remedy)
    return tuple(lines)


def settled_device(
    device: Name, environment: Mapping[str, str] = os.environ
) -> Name | Literal["cuda"]:
    """Replace auto by cuda if there is a GPU: with auto, a lost GPU would silently mean the CPU.

    Unlike `semix.data.device.resolve_device`, this asks the driver instead of torch, can answer for
    another process's environment, keeps `auto` if there is no GPU, and accepts any other device.

    Raises InputError: as for `visible_gpus`.
    """
    return "cuda" if device == "auto" and visible_gpus(environment) else device


def ask_driver(query: str) -> tuple[list[str], str]:
    """One line per GPU, and what is wrong with the driver; both empty without a GPU.

    Args:
        query: fields as nvidia-smi names them.
    """
    nvidia_smi, lines = shutil.which("nvidia-smi"), list[str]()
    if nvidia_smi is None:
        return [], "there is a GPU but no nvidia-smi" if has_gpu_file() else ""
    command = [nvidia_smi, f"--query-gpu={query}", "--format=csv,noheader"]
    outcome = supervise(command, on_line=lines.append, limit_s=ANSWER_S)
    if outcome.hung or outcome.stuck:
        return [], f"no answer within {ANSWER_S:.0f} s"
    if outcome.returncode in (0, INFOROM):
        return [line for line in lines if line and not line.startswith("WARNING")], ""
    error_line = next((line for line in lines if line and not line.isdecimal()), str(outcome))
    return [], "" if outcome.returncode == NO_DEVICE and not has_gpu_file() else error_line


def has_gpu_file() -> bool:
    """Whether we may use a GPU, even a broken one; GPUs that we may not open are another job's."""
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
    """The fault of the first visible GPU, which is tried in another process.

    Args:
        environment: changes to the environment of this process.
    Returns:
        Empty if the GPU works, or cannot be tried, for example because torch cannot be read.
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
