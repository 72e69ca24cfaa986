"""GPUs as the driver and as torch see them, and whether they multiply."""

import platform
import subprocess
from collections.abc import Iterator
from typing import Any

from flows.doctor.finding import FAILED, OK, WARNING, Finding
from flows.doctor.subject import Subject

SIDE = 64  # of the matrices
ANSWER_S = 30.0  # of nvidia-smi, which first wakes the GPUs


def check(subject: Subject) -> Iterator[Finding]:
    import torch

    driver, fault = _driver()
    if fault:
        remedy = "load or install NVIDIA's driver again; without it runs take the CPU"
        yield Finding("driver", FAILED, f"nvidia-smi: {fault}", remedy)
    else:
        yield Finding("driver", OK, "; ".join(driver) or "no NVIDIA GPU")
    if not torch.cuda.is_available():
        yield _without_gpu(subject.dtype, driver, torch)
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(index, subject.dtype, torch)


def _driver() -> tuple[list[str], str]:
    """Name, memory and driver of each GPU; and what is wrong with the driver, empty for nothing."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"no answer within {ANSWER_S:.0f} s"
    if found.returncode == 0:
        return found.stdout.strip().splitlines(), ""
    told = (found.stdout.strip() or found.stderr.strip()).splitlines()
    return [], told[0] if told else f"exit status {found.returncode}"


def _without_gpu(dtype: str, driver: list[str], torch: Any) -> Finding:
    if driver:
        remedy = "install a torch for this driver's CUDA, and look at CUDA_VISIBLE_DEVICES"
        return Finding("device", FAILED, f"torch {torch.__version__} sees no GPU", remedy)
    _multiply("cpu", dtype, torch)
    found = f"CPU alone ({platform.machine()}, {torch.get_num_threads()} threads)"
    if dtype == "float32":
        return Finding("device", OK, found)
    remedy = f"{dtype} is made for GPUs; run on one, or choose float32"
    return Finding("device", WARNING, found, remedy)


def _gpu(index: int, dtype: str, torch: Any) -> Finding:
    name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
    try:
        with torch.cuda.device(index):
            if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
                remedy = "this GPU has no bfloat16; choose float16"
                return Finding("device", FAILED, f"{name}: {dtype}", remedy)
            _multiply(f"cuda:{index}", dtype, torch)
    except RuntimeError as error:
        remedy = "free or restart the GPU; install a torch for its architecture"
        return Finding("device", FAILED, f"{name}: {str(error).splitlines()[0]}", remedy)
    return Finding("device", OK, f"{name}: multiplies in {dtype}")


def _multiply(device: str, dtype: str, torch: Any) -> None:
    ones = torch.ones(SIDE, SIDE, device=device, dtype=getattr(torch, dtype))
    if float((ones @ ones).float().mean()) != SIDE:
        raise RuntimeError("a product of matrices is wrong")
