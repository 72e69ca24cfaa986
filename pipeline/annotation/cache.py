"""Measurements of this machine, by what was measured: another root need not measure again."""

import logging
from pathlib import Path

from data.cache_folder import cache_folder
from data.files import write_atomically
from pipeline.annotation.measurement import Measurement
from pipeline.annotation.sealed import open_sealed, seal

log = logging.getLogger("semix.build")


def cached(digest: str) -> Measurement | None:
    """What was measured before under this digest; a damaged file counts as none."""
    path = _path(digest)
    try:
        tensors, facts = open_sealed(path.read_bytes())
        if facts.get("digest") != digest:
            raise ValueError("belongs to another measurement")
        return Measurement.of(tensors, facts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not used, and measured again: %s", path, error)
        return None


def keep(digest: str, measurement: Measurement) -> None:
    """Put it into the cache folder; one that cannot be written is only worth a warning."""
    content = seal(measurement.tensors(), measurement.facts() | {"digest": digest})
    try:
        write_atomically(_path(digest), content)
    except OSError as error:
        log.warning("prototypes are not cached: %s", error)


def _path(digest: str) -> Path:
    return cache_folder() / f"prototypes-{digest}.safetensors"
