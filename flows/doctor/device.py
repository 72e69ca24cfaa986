"""GPUs as the driver and as torch see them, and whether they multiply."""

import os
import platform
from collections.abc import Iterator
from typing import Any

from flows.doctor.finding import FAILED, OK, WARNING, Finding
from flows.doctor.subject import Subject
from flows.gpus import CHOSEN, ask_driver, visible_gpus


def check(subject: Subject) -> Iterator[Finding]:
    import torch

    driver, fault = ask_driver("name,memory.total,driver_version")
    chosen = os.environ.get(CHOSEN)
    hidden = chosen is not None and not visible_gpus()
    if fault:
        remedy = "load or install NVIDIA's driver again; or set CUDA_VISIBLE_DEVICES= for the CPU"
        yield Finding("driver", WARNING if hidden else FAILED, f"nvidia-smi: {fault}", remedy)
    else:
        yield Finding("driver", OK, "; ".join(driver) or "no NVIDIA GPU")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu(index, subject.dtype, torch)
    elif (driver or chosen) and not hidden:
        remedy = "install a torch for this driver's CUDA, and look at CUDA_VISIBLE_DEVICES"
        yield Finding("device", FAILED, f"torch {torch.__version__} sees no GPU", remedy)
    else:
        yield _cpu(subject.dtype, torch, hidden=bool(driver))


def _cpu(dtype: str, torch: Any, *, hidden: bool) -> Finding:
    from data.device import multiply

    multiply("cpu", dtype)
    found = f"CPU alone ({platform.machine()}, {torch.get_num_threads()} threads)"
    if hidden:
        found = f"{found}; CUDA_VISIBLE_DEVICES hides its GPUs"
        return Finding("device", WARNING, found, "unset it to use them")
    if dtype == "float32":
        return Finding("device", OK, found)
    remedy = f"{dtype} is made for GPUs; run on one, or choose float32"
    return Finding("device", WARNING, found, remedy)


def _gpu(index: int, dtype: str, torch: Any) -> Finding:
    from data.device import multiply

    name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
    try:
        with torch.cuda.device(index):
            if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
                remedy = "this GPU has no bfloat16; choose float16"
                return Finding("device", FAILED, f"{name}: {dtype}", remedy)
            multiply(f"cuda:{index}", dtype)
    except RuntimeError as error:
        remedy = "free or restart the GPU; install a torch for its architecture"
        return Finding("device", FAILED, f"{name}: {str(error).splitlines()[0]}", remedy)
    return Finding("device", OK, f"{name}: multiplies in {dtype}")
