"""torch.compile of a denoiser's network."""

import os
import shutil
from typing import Any

from data.errors import InputError

COMPILERS = ("g++", "clang++")


def compile_network(network: Any, mode: str) -> None:
    """Compile in place; the work is done at the first call, once for each batch size.

    Args:
        mode: none; regional: its repeated blocks, as good and many times quicker to compile;
            full: all of it.
    Raises:
        InputError: this machine has no compiler for what torch generates.
    """
    if mode == "none":
        return
    compiler = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ((compiler,) if compiler else COMPILERS)):
        remedy = f"needs a C++ compiler ({compiler or ' or '.join(COMPILERS)}); install one"
        raise InputError("generator.compile", mode, remedy)
    if mode == "regional":
        network.compile_repeated_blocks(fullgraph=True, dynamic=False)
    else:
        network.compile(dynamic=False)
