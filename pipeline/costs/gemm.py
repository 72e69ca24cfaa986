"""How many FLOP a second a device reaches where nothing holds it up."""

import time

import torch

from data.device import resolve_dtype

SIDES = {"cpu": 1024, "cuda": 8192}  # of the square matrices; large enough to fill the device
SECONDS = 0.5
TERA = 1e12


def device_rate(device: str, dtype: str) -> float:
    """TFLOP/s of a matrix product, the median of about half a second.

    Args:
        dtype: float32, float16 or bfloat16.
    Raises:
        InputError: the device lacks that precision.
    """
    kind = torch.device(device)
    side = SIDES[kind.type]
    # Zeros would flatter: a GPU clocks higher where nothing switches.
    precision = resolve_dtype(dtype, device, field="dtype")
    left, right = (torch.randn(side, side, device=kind).to(precision) for _ in range(2))
    torch.mm(left, right)
    seconds: list[float] = []
    while sum(seconds) < SECONDS:
        synchronise(kind)
        start = time.perf_counter()
        torch.mm(left, right)
        synchronise(kind)
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / sorted(seconds)[len(seconds) // 2] / TERA


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
