"""Where the images of a series lie: weights of its classes."""

import random

from pipeline.config import MixingConfig
from pipeline.plan.seeds import hashed_seed

# Exponent of the dense middle: of 8 alphas, half lie between 0.36 and 0.64.
DENSITY = 1.5


def mixture_points(mixing: MixingConfig, group: int) -> tuple[tuple[float, ...], ...]:
    """Weights of the classes in each image of a group, [A][k]; each row sums to 1.

    Pairs come with alpha ascending, or in the order given. More classes come pure first, then
    mixed at points drawn uniformly from the simplex.
    """
    if mixing.classes == 2:
        return tuple((alpha, 1 - alpha) for alpha in _alphas(mixing, group))
    pure = [tuple(float(k == j) for j in range(mixing.classes)) for k in range(mixing.classes)]
    rng = random.Random(hashed_seed(mixing.seed, "points", group))
    drawn = [_uniform_point(rng, mixing.classes) for _ in range(mixing.images - mixing.classes)]
    return (*pure, *drawn)


def _alphas(mixing: MixingConfig, group: int) -> tuple[float, ...]:
    if not isinstance(mixing.alphas, int):
        return mixing.alphas
    if mixing.grid == "random":
        rng = random.Random(hashed_seed(mixing.seed, "alphas", group))
        return (0.0, *sorted(rng.random() for _ in range(mixing.alphas - 2)), 1.0)
    return alpha_grid(mixing.alphas, dense=mixing.grid == "interior")


def alpha_grid(count: int, *, dense: bool = False) -> tuple[float, ...]:
    """0, 1/(A-1), ..., 1; or the same moved towards 1/2, where most of the change happens."""
    even = tuple(position / (count - 1) for position in range(count))
    if not dense:
        return even
    return tuple(
        (1 + (1 if alpha > 0.5 else -1) * abs(2 * alpha - 1) ** DENSITY) / 2 for alpha in even
    )


def _uniform_point(rng: random.Random, classes: int) -> tuple[float, ...]:
    """A point of the simplex: exponential variates over their sum, which is Dirichlet(1)."""
    parts = [rng.expovariate(1) for _ in range(classes)]
    return tuple(part / sum(parts) for part in parts)
