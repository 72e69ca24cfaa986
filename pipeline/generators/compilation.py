"""torch.compile of a denoiser's network."""

import os
import shlex
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from data.cache_folder import keep_compiled_to_ourselves
from data.errors import InputError

COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # as torch has it; CXX is another
# Of one function. A U-Net's blocks have up to four shapes, each in every layout of a batch: images
# with and without guidance or cached features, and noises that are scored twice, or with gradients.
PROGRAMS = 64


def compile_network(network: Any, mode: str) -> None:
    """Compile in place; the work is done at the first call, once for each batch size.

    Args:
        mode: none; regional: its transformer blocks, quick to compile because alike, which do all
            of a DiT's work, 75 % of SDXL's, 54 % of Stable Diffusion 2.1's and 45 % of 1.5's (by
            FLOP): convolutions are outside; full: all of the network, which takes longer.
    Raises:
        InputError: this machine has no compiler for what torch generates, or no folder for it.
    """
    check_compiler(mode)
    if mode == "none":
        return
    keep_compiled_to_ourselves()
    if mode == "regional":
        network.compile_repeated_blocks(fullgraph=True, dynamic=False)
    else:
        network.compile(dynamic=False)


def room_for_programs(mode: str) -> AbstractContextManager[object]:
    """Around each call of a network that was compiled so.

    Dynamo keeps eight programs of a function by default: with one more it fails, or for `full`
    silently runs the network as it was written. Its settings are each thread's own, and autograd
    calls checkpointed networks from threads of its own.
    """
    if mode == "none":
        return nullcontext()
    from torch._dynamo import config  # seconds, for those who compile

    return config.patch(recompile_limit=PROGRAMS)


def check_compiler(mode: str) -> None:
    """Raises InputError if `mode` needs a compiler that this machine lacks."""
    compiler = os.environ.get("CXX", COMPILER)
    if mode != "none" and shutil.which(shlex.split(compiler)[0]) is None:
        remedy = f"needs the C++ compiler {compiler}, which is not there; install it, name "
        remedy += "another in CXX, or set it to none"
        raise InputError("generator.compile", mode, remedy)
