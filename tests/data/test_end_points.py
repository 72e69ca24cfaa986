"""Unmixed images against prototypes, by hand."""

import torch

from data.end_points import read_end_points
from tests import handmade

VECTORS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.6]])


def test_unmixed_images_are_compared_with_all_classes_and_with_their_own():
    record = handmade.record(0, 3)  # cat and dog, alphas 0, 0.5, 1
    features = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.7, 0.5]])
    found = read_end_points(record, features, VECTORS)
    assert found.intended.tolist() == [1, -1, 0]
    assert found.nearest.tolist() == [1, -1, 2]
    assert found.of_series.tolist() == [1, -1, 0]


def test_a_simplex_has_an_end_point_for_each_class():
    mixture = [[1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    record = handmade.record(0, 4, classes=[2, 0, 1], mixture=mixture)
    found = read_end_points(record, VECTORS[[2, 2, 1, 1]], VECTORS)
    assert found.intended.tolist() == [2, -1, 1, 0]
    assert found.nearest.tolist() == found.of_series.tolist() == [2, -1, 1, 1]


def test_features_that_are_no_numbers_are_near_nothing():
    record = handmade.record(0, 2)
    features = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0]])
    found = read_end_points(record, features, VECTORS)
    assert found.intended.tolist() == [1, 0]
    assert found.nearest.tolist() == found.of_series.tolist() == [-1, -1]
