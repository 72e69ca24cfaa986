"""torch.compile of a denoiser's network."""

import os
import shlex
import shutil
import sys
from typing import Any

from data.errors import InputError

COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # as torch has it; CXX is another


def compile_network(network: Any, mode: str) -> None:
    """Compile in place; the work is done at the first call, once for each batch size.

    Args:
        mode: none; regional: its repeated blocks, as good and many times quicker to compile;
            full: all of it.
    Raises:
        InputError: this machine has no compiler for what torch generates.
    """
    check_compiler(mode)
    if mode == "none":
        return
    if mode == "regional":
        network.compile_repeated_blocks(fullgraph=True, dynamic=False)
    else:
        network.compile(dynamic=False)


def check_compiler(mode: str) -> None:
    """Raises InputError if `mode` needs a compiler that this machine lacks."""
    compiler = os.environ.get("CXX", COMPILER)
    if mode != "none" and shutil.which(shlex.split(compiler)[0]) is None:
        remedy = f"needs the C++ compiler {compiler}, which is not there; install it, name "
        remedy += "another in CXX, or set it to none"
        raise InputError("generator.compile", mode, remedy)
