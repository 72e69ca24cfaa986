"""Pictures in an audit: faults worked out by hand, and pictures alike between series."""

import numpy as np
import pytest

from semix.pipeline.audit.pictures import (
    FAULTS,
    Duplicates,
    difference_hash,
    find_duplicates,
    measure_pictures,
)

ALPHAS = np.linspace(0, 1, 3)


def grey(*levels: float, side: int = 16) -> np.ndarray:
    """One uniform image per level, uint8 [A, side, side, 3]."""
    return np.stack([np.full((side, side, 3), level, dtype=np.uint8) for level in levels])


def ramp(side: int = 16) -> np.ndarray:
    """Brighter to the right, 10 levels per pixel; the same from top to bottom."""
    row = np.arange(side, dtype=np.uint8) * 10
    return np.broadcast_to(row[None, :, None], (side, side, 3))


def faults(images: np.ndarray) -> list[set[str]]:
    codes = measure_pictures(images, np.linspace(0, 1, len(images))).faults
    return [{name for bit, name in enumerate(FAULTS) if value >> bit & 1} for value in codes]


def test_degenerate_images_are_told_apart():
    dark, bright = ramp() // 30, 255 - ramp() // 30  # a spread of 1.6 levels
    images = np.stack([*grey(0, 120, 255), dark, bright, ramp()])
    assert faults(images) == [
        {"flat", "black"},
        {"flat"},
        {"flat", "white"},
        {"black"},
        {"white"},
        set(),
    ]


def test_hash_bits_are_set_where_it_grows_brighter():
    right = difference_hash(ramp().mean(-1, dtype=np.float32)[None])[0]
    assert right.tolist() == [2**64 - 1, 0]
    down = difference_hash(ramp().mean(-1, dtype=np.float32).T[None])[0]
    assert down.tolist() == [0, 2**64 - 1]


def test_hash_ignores_noise_on_a_flat_background():
    rng = np.random.default_rng(0)
    image = np.zeros((64, 64), dtype=np.float32)
    image[20:40, 10:30] = 200
    noisy = image + rng.normal(0, 2, image.shape).astype(np.float32)
    clean, other = difference_hash(np.stack([image, noisy]))
    assert np.bitwise_count(clean ^ other).sum() <= 1


@pytest.mark.parametrize("side", [7, 8, 9, 30])
def test_any_size_gives_a_hash(side):
    images = np.random.default_rng(1).integers(0, 256, (2, side, side + 3, 3), dtype=np.uint8)
    result = measure_pictures(images, ALPHAS[:2])
    assert result.hashes.shape == (2, 2) and result.coarse.shape == (2, 19)


def test_coarse_thumbnail_is_a_mean_of_each_cell_and_of_each_colour():
    image = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    image[0, :2, :2] = (90, 60, 30)  # the first of 4 x 4 cells
    coarse = measure_pictures(image, ALPHAS[:1]).coarse[0]
    assert coarse[:16].tolist() == [60] + 15 * [0]
    assert coarse[16:].tolist() == [round(level * 4 / 64) for level in (90, 60, 30)]


def test_steps_follow_alpha_and_not_the_order_of_storage():
    images = grey(0, 30, 10)
    assert measure_pictures(images, np.array([0.0, 1.0, 0.5])).steps.tolist() == [10.0, 20.0]


def test_equal_pixels_alone_have_equal_digests():
    images = np.stack([ramp(), ramp(), ramp() + np.uint8(1)])
    first, same, other = measure_pictures(images, ALPHAS).exact
    assert first == same != other


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
    measured = [measure_pictures(series, alphas) for series in images]
    arrays = (
        np.stack([getattr(f, key) for f in measured]) for key in ("hashes", "coarse", "exact")
    )
    all_usable = np.ones(images.shape[:2], dtype=bool)
    return find_duplicates(*arrays, usable=all_usable if usable is None else usable)


def test_different_pictures_are_not_alike(images):
    assert len(find(images).rows) == 0


def test_the_later_series_of_equal_pictures_is_named_with_the_earliest(images):
    images[40, 2] = images[50, 0] = images[7, 1]
    duplicates = find(images)
    assert duplicates.rows.tolist() == [40, 50]
    assert duplicates.of.tolist() == [7, 7]
    assert duplicates.same.tolist() == [True, True]


def test_a_noisy_copy_is_found_and_a_brighter_one_is_not(images):
    rng = np.random.default_rng(6)
    noise = rng.normal(0, 2, images[0, 0].shape)
    images[31, 0] = (images[30, 0] + noise).clip(0, 255).round()
    images[32, 0] //= 2
    images[33, 0] = images[32, 0] + 40  # brightness grows in the same places
    alike = find(images)
    assert (alike.rows.tolist(), alike.of.tolist(), alike.same.tolist()) == ([31], [30], [False])


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
    duplicates = find_duplicates(hashes, coarse, exact, usable=np.ones((20_000, 2), dtype=bool))
    assert duplicates.rows.tolist() == list(range(1, 20_000))
    assert not duplicates.of.any()
