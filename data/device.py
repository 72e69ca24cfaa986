"""Which device `auto` means, and whether one works.

`python -m data.device` asks a GPU: its exit status is BROKEN if that fails, and its last line says
why; SIGALRM ends it if there is no answer.
"""

import signal
import sys

import torch

from data.errors import InputError

SIDE = 64  # of the matrices
ANSWER_S = 180  # of a GPU, of which the first to ask wakes all
BROKEN = 3


def resolve_device(name: str) -> str:
    """auto is cuda where there is one, else cpu. Raises InputError for a device that is not."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        remedy = "torch sees no GPU here, and semix doctor says more; use cpu"
        raise InputError("device", name, remedy)
    return name


def multiply(device: str, dtype: str = "float32") -> None:
    """Raises RuntimeError: a product of matrices fails there, or is wrong."""
    ones = torch.ones(SIDE, SIDE, device=device, dtype=getattr(torch, dtype))
    if float((ones @ ones).float().mean()) != SIDE:
        raise RuntimeError("a product of matrices is wrong")


def main() -> int:
    signal.alarm(ANSWER_S)  # torch is imported: from here on it is the GPU that hangs
    try:
        multiply("cuda")
    except torch.OutOfMemoryError:  # another process has it all
        return 0
    except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
        print(next(iter(str(error).splitlines()), type(error).__name__))
        return BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
