"""Where this machine keeps what can be had again: the cache folder."""

import os
import socket
from pathlib import Path

from data.errors import InputError

COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it when it first compiles


def cache_folder() -> Path:
    """SEMIX_CACHE, or ~/.cache/semix; it need not be there yet, and may be removed at any time."""
    return Path(os.environ.get("SEMIX_CACHE") or "~/.cache/semix").expanduser()


def compiled_folder() -> Path:
    """Where torch keeps the programs that it compiles: as it is told, else in the cache folder."""
    # By machine: a home may be shared, and what was compiled for one processor crash another.
    own = cache_folder() / f"inductor-{socket.gethostname()}"
    return Path(os.environ.get(COMPILED) or own)


def keep_compiled_to_ourselves() -> None:
    """Before anything is compiled: keep it in a folder of ours, unless torch was told of another.

    Left to itself torch runs what it finds in a folder of /tmp that anyone could have made.

    Raises:
        InputError: that folder cannot be made, or others can write in it.
    """
    if os.environ.get(COMPILED):
        return
    folder, remedy = compiled_folder(), f"set {COMPILED} to a folder of yours"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InputError(COMPILED, folder, f"cannot be made ({error.strerror}); {remedy}") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InputError(COMPILED, folder, f"others of this machine can write there; {remedy}")
    os.environ[COMPILED] = str(folder.absolute())
