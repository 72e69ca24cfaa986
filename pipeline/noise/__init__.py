"""Initial noise: random, or selected by its stability under sampling and inversion."""

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
    # The cost of noise selection is needed before torch is loaded, which takes seconds.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.search"), name)
