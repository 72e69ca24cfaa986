import pytest

from pipeline.config import MixingConfig
from pipeline.plan.points import alpha_grid, mixture_points


def mixing(**settings) -> MixingConfig:
    return MixingConfig.model_validate({"groups_per_pair": 1, **settings})


def test_even_alphas():
    assert alpha_grid(3) == (0.0, 0.5, 1.0)
    assert mixture_points(mixing(alphas=3), 5) == ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0))
    assert mixture_points(mixing(alphas=(0.7, 0.2)), 5)[0] == (0.7, pytest.approx(0.3))


def test_interior_alphas_keep_the_ends_and_crowd_the_middle():
    even, dense = alpha_grid(8), alpha_grid(8, dense=True)
    assert (dense[0], dense[-1]) == (0.0, 1.0)
    assert list(dense) == sorted(dense)
    assert all(abs(d - 0.5) <= abs(e - 0.5) for d, e in zip(dense, even, strict=True))
    assert dense[3] == pytest.approx(0.5 - 0.5 * (1 / 7) ** 1.5)
    assert alpha_grid(3, dense=True) == (0.0, 0.5, 1.0)


def test_random_alphas_are_a_function_of_seed_and_group():
    points = mixture_points(mixing(grid="random", alphas=6), 3)
    alphas = [first for first, _ in points]
    assert alphas == sorted(alphas)
    assert (alphas[0], alphas[-1]) == (0.0, 1.0)
    assert points == mixture_points(mixing(grid="random", alphas=6), 3)
    assert points != mixture_points(mixing(grid="random", alphas=6), 4)
    assert points != mixture_points(mixing(grid="random", alphas=6, seed=1), 3)


def test_a_simplex_has_its_corners_first_then_uniform_points():
    settings = mixing(classes=3, alphas=5, grid="random")
    points = mixture_points(settings, 0)
    assert points[:3] == ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    inside = [point for group in range(1000) for point in mixture_points(settings, group)[3:]]
    assert all(sum(point) == pytest.approx(1) and min(point) > 0 for point in inside)
    # Each coordinate of a uniform point of the triangle has mean 1/3 and variance 1/18.
    for k in range(3):
        values = [point[k] for point in inside]
        mean = sum(values) / len(values)
        assert mean == pytest.approx(1 / 3, abs=0.03)
        assert sum((v - mean) ** 2 for v in values) / len(values) == pytest.approx(1 / 18, abs=0.01)
