"""What torch.compile needs: a compiler, and a cache whose files may be executed."""

import os
from collections.abc import Iterator
from pathlib import Path

from data.machine import COMPILED, compiled_folder
from flows.doctor.finding import FAILED, OK, Finding
from flows.doctor.subject import Subject


def check(subject: Subject) -> Iterator[Finding]:
    if _compiles(subject):
        yield _cache(compiled_folder())


def _compiles(subject: Subject) -> bool:
    """Whether anything is to be compiled. Raises InputError if there is no compiler for it."""
    if subject.build is not None:
        from pipeline.generators.latent_diffusion import check_compiler as check_of_build

        mode = subject.build.generator.compile
        check_of_build(mode)
        return mode != "none"
    if subject.train is not None and subject.train.compile:
        import torch

        from calib.loop import check_compiler as check_of_training

        check_of_training(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return True
    return False


def _cache(folder: Path) -> Finding:
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    remedy = f"set {COMPILED} to a folder of yours whose file system is mounted without noexec"
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return Finding("compilation", FAILED, f"{folder}: nothing may be executed there", remedy)
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("compilation", FAILED, f"{folder} cannot be written", remedy)
    return Finding("compilation", OK, f"a compiler is there, and {folder} for what it makes")
