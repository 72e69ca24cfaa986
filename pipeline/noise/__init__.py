"""Initial noise: drawn, or chosen by how stable it is under sampling and inversion."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semix.pipeline.noise.search import (
        initial_noise,
        inversion_stability,
        optimise_noise,
        select_noise,
    )

__all__ = ["initial_noise", "inversion_stability", "optimise_noise", "select_noise"]


def __getattr__(name: str) -> Any:
    # What choosing costs is asked before torch is loaded, which takes seconds.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.search"), name)
