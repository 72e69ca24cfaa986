"""Devices: which one `auto` selects, which precisions it has, and whether a GPU works.

`python -m semix.data.device` tests a GPU: its exit status is BROKEN if that fails, and its last
line says why; SIGALRM ends it if the GPU does not respond.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from semix.data.errors import InputError
from semix.data.printable import print_line

SIDE = 64  # of the square matrices in the test
ANSWER_S = 180  # timeout; the first process that uses a GPU initialises all of them
BROKEN = 3
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> str:
    """Resolve `auto` to cuda or cpu. Raises InputError for a device that does not exist."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        remedy = "torch sees no GPU here, and semix doctor says more; use cpu"
        raise InputError("device", name, remedy)
    return name


def device_name(device: torch.device) -> str:
    """`cpu`, or the model of a GPU, as in `NVIDIA H100 80GB HBM3`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def resolve_dtype(name: str, device: str, *, field: str) -> torch.dtype:
    """The torch dtype. Raises InputError if the device lacks it, or computes it badly."""
    if name == "float16" and device == "cpu":
        raise InputError(field, name, "needs a GPU; use float32 or bfloat16 on a CPU")
    if name == "bfloat16" and device.startswith("cuda"):
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise InputError(field, name, "this GPU lacks it; use float16")
    return DTYPES[name]


@contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Let GPUs multiply and convolve float32 in `precision`, in all threads, within the block.

    By default torch convolves in tf32, whose products have 10 bits of mantissa instead of 23;
    `ieee` is true float32. Also usable as a decorator.
    """
    cudnn: Any = torch.backends.cudnn  # creates its attributes at import
    matmul = torch.backends.cuda.matmul
    operations = matmul, cudnn.conv, cudnn.rnn
    before = [operation.fp32_precision for operation in operations]

    def change(matmuls: str, convolutions: str, recurrent: str) -> None:
        # Torch's older flags too: its compiler reads them, and they raise where the two disagree.
        matmul.allow_tf32, cudnn.allow_tf32 = matmuls == "tf32", convolutions == "tf32"
        for operation, value in zip(operations, (matmuls, convolutions, recurrent), strict=True):
            operation.fp32_precision = value

    try:
        change(precision, precision, precision)
        yield
    finally:
        change(*before)


def multiply(device: str, dtype: str = "float32") -> None:
    """Multiply matrices on a device. Raises RuntimeError if it fails or the product is wrong."""
    ones = torch.ones(SIDE, SIDE, device=device, dtype=getattr(torch, dtype))
    if float((ones @ ones).float().mean()) != SIDE:
        raise RuntimeError("a product of matrices is wrong")


def main() -> int:
    signal.alarm(ANSWER_S)  # torch is imported: from here on only the GPU can hang
    try:
        multiply("cuda")
    except torch.OutOfMemoryError:  # another process has all of its memory
        return 0
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        print_line(next(iter(str(error).splitlines()), type(error).__name__))
        return BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
