"""What a build or a training run needs, looked at before money is spent; one file a check."""

from collections.abc import Iterator

from data.errors import InputError
from flows.doctor import (
    clocks,
    compilation,
    device,
    disk_space,
    extras,
    libraries,
    limits,
    memory,
    model_files,
    prefect_server,
    real_images,
    store_access,
)
from flows.doctor.finding import FAILED, Finding
from flows.doctor.subject import Subject, subject_of

__all__ = ["FAILED", "Finding", "Subject", "examine", "subject_of"]

CHECKS = {
    "libraries": libraries.check,
    "extras": extras.check,
    "limits": limits.check,
    "device": device.check,
    "compilation": compilation.check,
    "models": model_files.check,
    "memory": memory.check,
    "real images": real_images.check,
    "training": real_images.check_training,
    "store": store_access.check,
    "disk": disk_space.check,
    "Prefect": prefect_server.check,
    "clocks": clocks.check,
}


def examine(subject: Subject) -> Iterator[Finding]:
    """What every check finds; none of them leaves anything behind."""
    for name, check in CHECKS.items():
        try:
            yield from check(subject)
        except InputError as error:
            yield Finding(name, FAILED, f"{error.field} = {error.value}", error.remedy)
        except Exception as error:  # the others still have something to say
            found = f"{type(error).__name__}: {error}"
            yield Finding(name, FAILED, found, "cure this first; a run would stop at it too")
