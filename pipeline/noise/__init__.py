"""Initial noise: drawn, or chosen by how stable it is under sampling and inversion."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.noise.initial import initial_noise
    from pipeline.noise.optimisation import optimise_noise
    from pipeline.noise.selection import select_noise
    from pipeline.noise.stability import inversion_stability

__all__ = ["initial_noise", "inversion_stability", "optimise_noise", "select_noise"]

_HOMES = {
    "initial_noise": "initial",
    "inversion_stability": "stability",
    "optimise_noise": "optimisation",
    "select_noise": "selection",
}


def __getattr__(name: str) -> Any:
    # What choosing costs is asked before torch is loaded, which takes seconds.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
