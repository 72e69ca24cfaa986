"""The criteria for images of fast recipes, on samples whose distributions are known."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.criteria import (
    feature_criterion,
    frechet_distance,
    leading_directions,
    weight_criteria,
)


def series(groups: int = 100, *, seed: int, steep: float = 6.0, noise: float = 0.03) -> Tensor:
    """Weights [G, 8, 1] that follow a sigmoid of alpha, each series shifted and rough."""
    rng = torch.Generator().manual_seed(seed)
    alphas = torch.linspace(0, 1, 8)
    shift = 0.15 * torch.randn(groups, 1, generator=rng)
    rough = noise * torch.randn(groups, 8, generator=rng)
    return (torch.sigmoid(steep * (alphas - 0.5 - shift)) + rough)[..., None]


def by_name(criteria: list[dict]) -> dict[str, dict]:
    return {criterion["name"]: criterion for criterion in criteria}


def test_figures_of_two_series_by_hand():
    exact = torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.3, 0.1]])[..., None]
    results = by_name(weight_criteria(exact, exact, exact, seed=0))
    assert results["series that only rise"]["exact"] == 0.5
    assert results["weights in 0.2 to 0.8"]["exact"] == pytest.approx(2 / 6)
    # Five bins are met, of width 0.1: that of 0.0 twice.
    expected = -(2 / 6) * math.log(2 / 6) - 4 * (1 / 6) * math.log(1 / 6)
    assert results["entropy of weights"]["exact"] == pytest.approx(expected)


def test_the_same_images_pass_with_no_distance():
    exact, other = series(seed=0), series(seed=1)
    for criterion in weight_criteria(exact, exact, other, seed=0):
        assert (criterion["distance"], criterion["passed"]) == (0, True)


def test_weights_outside_the_histogram_count_in_its_end_bins():
    far, near = torch.tensor([[-9.0, 9.0]])[..., None], torch.tensor([[-0.5, 1.49]])[..., None]
    far, near = (
        by_name(weight_criteria(w, w, w, seed=0))["entropy of weights"] for w in (far, near)
    )
    assert far["exact"] == near["exact"] == pytest.approx(math.log(2))
    one_bin = torch.tensor([[0.12, 0.18]])[..., None]
    results = by_name(weight_criteria(one_bin, one_bin, one_bin, seed=0))
    assert results["entropy of weights"]["exact"] == 0


def test_the_exact_recipe_from_further_seeds_passes_nearly_always():
    num_failed = 0
    for seed in range(100):
        exact, fast, other = (series(seed=3 * seed + part) for part in range(3))
        num_failed += not all(c["passed"] for c in weight_criteria(exact, fast, other, seed=0))
    assert num_failed <= 5


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        ({"noise": 0.1}, "series that only rise"),
        ({"steep": 30.0}, "weights in 0.2 to 0.8"),
        ({"steep": 1.0}, "entropy of weights"),
    ],
)
def test_another_distribution_of_weights_is_caught(change, caught):
    results = weight_criteria(series(seed=0), series(seed=0, **change), series(seed=1), seed=0)
    assert not by_name(results)[caught]["passed"]


def test_a_share_that_no_series_has_may_appear_in_three():
    def rising(falling: int) -> Tensor:
        weights = torch.linspace(0, 1, 4).repeat(50, 1)
        weights[:falling, 1] = 0.9
        return weights[..., None]

    results = [
        by_name(weight_criteria(rising(0), rising(falling), rising(0), seed=0))
        for falling in (3, 4)
    ]
    assert [f["series that only rise"]["limit"] for f in results] == [3 / 50, 3 / 50]
    assert [f["series that only rise"]["passed"] for f in results] == [True, False]


def test_a_simplex_has_no_rising_series():
    weights = torch.rand(20, 6, 3, generator=torch.Generator().manual_seed(0))
    results = by_name(weight_criteria(weights, weights, weights, seed=0))
    assert set(results) == {"entropy of weights", "weights in 0.2 to 0.8"}


def gaussian(count: int, scales: Tensor, *, seed: int, mean: float = 0.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return mean + scales * torch.randn(count, len(scales), generator=rng)


def test_frechet_distance_is_the_formula():
    """Against the matrix root by its eigenvalues."""
    mixing = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    first = gaussian(400, torch.linspace(0.5, 2, 6), seed=1) @ mixing
    second = gaussian(300, torch.ones(6), seed=2, mean=0.3)
    covariances = [torch.cov(sample.double().T) for sample in (first, second)]
    root = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.sqrt().sum()
    means = (first.double().mean(0) - second.double().mean(0)).square().sum()
    expected = means + sum(c.trace() for c in covariances) - 2 * root
    assert frechet_distance(first, second) == pytest.approx(float(expected), rel=1e-9)


def test_frechet_distance_of_a_shift_is_its_square():
    first = gaussian(50, torch.ones(4), seed=0)
    assert frechet_distance(first, first + 2.0) == pytest.approx(4 * 2.0**2)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-12)


def test_frechet_distance_bears_fewer_images_than_directions():
    first, second = (gaussian(20, torch.ones(50), seed=seed) for seed in (0, 1))
    results = frechet_distance(first, second)
    assert 0 < results < 100
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)


def test_leading_directions_keep_what_one_set_alone_varies_in():
    scales = torch.tensor([3.0, 2.0, 0.01, 0.01])
    usual = [gaussian(20, scales, seed=seed) for seed in (0, 1)]
    odd = gaussian(20, torch.tensor([0.01, 0.01, 0.01, 9.0]), seed=2)
    projected = leading_directions([*usual, odd])
    assert [sample.shape for sample in projected] == [(20, 2)] * 3  # one direction for ten images
    assert projected[2].std(0).max() > 5


def test_features_of_further_seeds_pass_and_shifted_ones_do_not():
    scales = torch.linspace(0.2, 1, 16)
    exact, fast, other = (gaussian(400, scales, seed=seed) for seed in range(3))
    results = feature_criterion(exact, fast, other)
    assert results["passed"]
    assert results["limit"] == pytest.approx(1.2 * results["other"])
    assert not feature_criterion(exact, fast + 0.3, other)["passed"]
    assert feature_criterion(exact, exact, other)["distance"] == pytest.approx(0, abs=1e-9)
