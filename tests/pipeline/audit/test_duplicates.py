"""Pictures alike between series, found without comparing all with all."""

import numpy as np
import pytest

from pipeline.audit.pictures import Duplicates, find_duplicates, look_at

SERIES, IMAGES = 60, 3


def scene(rng: np.random.Generator, side: int = 32) -> np.ndarray:
    """Smooth shapes, as pictures are: coarse noise enlarged."""
    coarse = rng.integers(0, 256, (8, 8, 3)).astype(np.float32)
    return np.kron(coarse, np.ones((side // 8, side // 8, 1))).astype(np.uint8)


@pytest.fixture
def images() -> np.ndarray:
    """uint8 [G, A, 32, 32, 3], all different."""
    rng = np.random.default_rng(5)
    return np.stack([[scene(rng) for _ in range(IMAGES)] for _ in range(SERIES)])


def find(images: np.ndarray, usable: np.ndarray | None = None) -> Duplicates:
    alphas = np.linspace(0, 1, images.shape[1])
    found = [look_at(series, alphas) for series in images]
    parts = (np.stack([getattr(f, key) for f in found]) for key in ("hashes", "coarse", "exact"))
    everything = np.ones(images.shape[:2], dtype=bool)
    return find_duplicates(*parts, usable=everything if usable is None else usable)


def test_different_pictures_are_not_alike(images):
    assert len(find(images).rows) == 0


def test_the_later_series_of_equal_pictures_is_named_with_the_earliest(images):
    images[40, 2] = images[50, 0] = images[7, 1]
    found = find(images)
    assert found.rows.tolist() == [40, 50]
    assert found.of.tolist() == [7, 7]
    assert found.same.tolist() == [True, True]


def test_a_noisy_copy_is_found_and_a_brighter_one_is_not(images):
    rng = np.random.default_rng(6)
    noise = rng.normal(0, 2, images[0, 0].shape)
    images[31, 0] = (images[30, 0] + noise).clip(0, 255).round()
    images[32, 0] //= 2
    images[33, 0] = images[32, 0] + 40  # brightness grows in the same places
    found = find(images)
    assert (found.rows.tolist(), found.of.tolist(), found.same.tolist()) == ([31], [30], [False])


def test_alike_within_one_series_is_no_duplicate(images):
    images[4, 1] = images[4, 0]
    assert len(find(images).rows) == 0


def test_unusable_pictures_are_left_out(images):
    images[40, 2] = images[7, 1]
    usable = np.ones(images.shape[:2], dtype=bool)
    usable[40, 2] = False
    assert len(find(images, usable).rows) == 0
    assert len(find(images, np.zeros_like(usable)).rows) == 0


def test_many_equal_pictures_cost_no_square():
    """Of 40,000 equal pictures there are 800 million pairs, which would not fit into memory."""
    hashes = np.zeros((20_000, 2, 2), dtype=np.uint64)
    coarse, exact = np.zeros((20_000, 2, 19), dtype=np.uint8), np.zeros((20_000, 2), np.uint64)
    found = find_duplicates(hashes, coarse, exact, usable=np.ones((20_000, 2), dtype=bool))
    assert found.rows.tolist() == list(range(1, 20_000))
    assert not found.of.any()
