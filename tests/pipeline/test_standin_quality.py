"""Frechet distances of features."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from semix.data.splits import ImageSplit
from semix.pipeline.standins.quality import MIN_PER_CLASS, REAL, _some, frechet_distance


def test_it_is_the_formula_of_heusel_et_al():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(50, 6)) @ rng.normal(size=(6, 6)), rng.normal(size=(40, 6)) + 1
    covariances = [np.cov(each.T, bias=True) for each in (first, second)]
    root = sqrtm(covariances[0] @ covariances[1]).real
    expected = ((first.mean(0) - second.mean(0)) ** 2).sum()
    expected += np.trace(covariances[0] + covariances[1] - 2 * root)
    found = frechet_distance(torch.from_numpy(first), torch.from_numpy(second))
    assert found == pytest.approx(expected, rel=1e-9)


def test_features_are_at_no_distance_from_themselves_even_if_they_are_few():
    features = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-5)
    assert frechet_distance(features, features + 1) == pytest.approx(64, rel=1e-5)


def test_a_rare_class_is_among_the_images_that_are_looked_at():
    targets = np.repeat([0, 1, 2], [REAL * 3, 1, MIN_PER_CLASS])
    split = ImageSplit(targets, load=lambda rows: rows, content=lambda _: "")
    images, found = _some(split)
    assert np.bincount(found).tolist() == [REAL // 3, 1, MIN_PER_CLASS]
    assert np.array_equal(targets[images], found)
