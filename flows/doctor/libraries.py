"""Python and libraries against the ranges that semix was released with."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flows.doctor.finding import FAILED, OK, UNCHECKED, Finding
from flows.doctor.subject import Subject

SHOWN = ("torch", "diffusers", "transformers", "open_clip_torch", "accelerate", "prefect")


def check(subject: Subject) -> Iterator[Finding]:
    try:
        needed = [Requirement(text) for text in requires("semix") or ()]
        python = metadata("semix")["Requires-Python"]
    except PackageNotFoundError:
        remedy = "install it: pip install -e ."
        yield Finding("libraries", UNCHECKED, "semix runs without being installed", remedy)
        return
    yield _python(python)
    found = [finding for need in needed if _applies(need) and (finding := unmet(need))]
    yield from found
    if not found:
        yield Finding("libraries", OK, ", ".join(f"{name} {version(name)}" for name in SHOWN))


def _python(wanted: str) -> Finding:
    ours = platform.python_version()
    if SpecifierSet(wanted).contains(ours, prereleases=True):
        return Finding("Python", OK, ours)
    return Finding("Python", FAILED, ours, f"make an environment with Python {wanted}")


def _applies(need: Requirement) -> bool:
    return need.marker is None or need.marker.evaluate({"extra": ""})


def unmet(need: Requirement) -> Finding | None:
    """A library that is missing or out of its range; None if it will do."""
    remedy = f"pip install '{need.name}{need.specifier}'"
    try:
        ours = version(need.name)
    except PackageNotFoundError:
        return Finding("libraries", FAILED, f"{need.name} is not installed", remedy)
    if need.specifier.contains(ours, prereleases=True):
        return None
    return Finding("libraries", FAILED, f"{need.name} {ours}, not {need.specifier}", remedy)
