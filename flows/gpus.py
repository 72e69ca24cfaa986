"""GPUs as NVIDIA's driver tells of them, asked without importing torch."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from subprocess import DEVNULL

from data.errors import InputError
from flows.child import end, python_module, start

ANSWER_S = 30.0  # of nvidia-smi, which first wakes the GPUs
PROBE_S = 120.0  # of a probe, which may hang for good; it first imports torch
NONE = 6  # its exit status where the driver works and shows this process no GPU, as in some jobs


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Identifiers as CUDA_VISIBLE_DEVICES takes them; empty without a GPU.

    Args:
        environment: of the process that is meant.
    Raises:
        InputError: nothing was chosen, and the driver does not work: there may be GPUs.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [part for part in chosen.split(",") if part not in ("", "-1")]
    found, fault = ask_driver("index")
    # Where one of several GPUs is lost, a line may say so instead of its number.
    if fault := fault or next((line for line in found if not line.isdecimal()), ""):
        remedy = (
            f"nvidia-smi cannot say which GPUs there are ({fault}); mend NVIDIA's driver, or set "
            "this to the GPUs to use, or to nothing, for the CPU"
        )
        raise InputError("CUDA_VISIBLE_DEVICES", "unset", remedy)
    return found


def settled_device(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """auto is cuda for a process that has a GPU: it would go on without a lost one on the CPU.

    Raises InputError: as of `visible_gpus`.
    """
    return "cuda" if device == "auto" and visible_gpus(environment) else device


def gpu_works(environment: Mapping[str, str]) -> bool:
    """Whether a process of its own multiplies matrices on the first GPU that it sees.

    Args:
        environment: changes to our own.
    """
    command = python_module("data.device")
    probe = start(command, environment=environment, stdout=DEVNULL, stderr=DEVNULL)
    try:
        return probe.wait(PROBE_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        end(probe)


def ask_driver(query: str) -> tuple[list[str], str]:
    """A line a GPU, and what is wrong with the driver; both empty without one.

    Args:
        query: fields as nvidia-smi names them.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    command = [program, f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return [], f"no answer within {ANSWER_S:.0f} s"
    if found.returncode == 0:
        return found.stdout.strip().splitlines(), ""
    if found.returncode == NONE:
        return [], ""
    told = (found.stdout.strip() or found.stderr.strip()).splitlines()
    return [], told[0] if told else f"exit status {found.returncode}"
