import pytest
import torch
from scipy.optimize import minimize

from pipeline.annotate import projection_weight
from pipeline.simplex import coordinates, simplex_projection

TRIANGLE = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])


def test_corners_middles_and_outside_by_hand():
    points = torch.tensor(
        [[2.0, 0.0, 5.0], [1.0, 1.0, 0.0], [0.5, 0.5, -1.0], [-3.0, 1.0, 0.0], [9.0, 9.0, 0.0]]
    )
    expected = [[0, 1, 0], [0, 0.5, 0.5], [0.5, 0.25, 0.25], [0.5, 0, 0.5], [0, 0.5, 0.5]]
    torch.testing.assert_close(simplex_projection(points, TRIANGLE), torch.tensor(expected))
    raw = coordinates(points, TRIANGLE)
    torch.testing.assert_close(raw[3], torch.tensor([2.0, -1.5, 0.5]))


def test_two_vertices_give_the_projection_weight_of_csm():
    generator = torch.Generator().manual_seed(0)
    features, first, second = (torch.randn(n, 7, generator=generator) for n in (20, 1, 1))
    weight = projection_weight(features, first.expand(20, 7), second.expand(20, 7))
    raw = coordinates(features, torch.cat([first, second]))
    torch.testing.assert_close(raw, torch.stack([weight, 1 - weight], 1))
    clipped = weight.clamp(0, 1)
    labels = simplex_projection(features, torch.cat([first, second]))
    torch.testing.assert_close(labels, torch.stack([clipped, 1 - clipped], 1))


@pytest.mark.parametrize("classes", [3, 4, 6])
def test_it_is_the_nearest_point_of_the_simplex(classes):
    """Against a general solver of the constrained least squares problem."""
    generator = torch.Generator().manual_seed(classes)
    vertices = torch.randn(classes, 9, generator=generator, dtype=torch.float64)
    features = 1.5 * torch.randn(8, 9, generator=generator, dtype=torch.float64)
    found = simplex_projection(features, vertices)
    torch.testing.assert_close(found.sum(1), torch.ones(8, dtype=torch.float64))
    for feature, weights in zip(features, found, strict=True):
        solved = minimize(
            lambda w, f=feature: float((torch.from_numpy(w) @ vertices - f).square().sum()),
            [1 / classes] * classes,
            bounds=[(0, 1)] * classes,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            tol=1e-12,
        )
        torch.testing.assert_close(weights, torch.from_numpy(solved.x), atol=1e-4, rtol=0)


def test_degenerate_vertices_are_an_error():
    line = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    with pytest.raises(ValueError, match="coincide or lie in one line"):
        coordinates(torch.zeros(1, 2), line)
