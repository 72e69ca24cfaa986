"""Noise as its constants say; blur of a point, of lines and of even images; saturation."""

import numpy as np
import pytest

from semix.calib.corruptions import corrupt
from semix.calib.corruptions.noise_blur import glass_blur
from semix.calib.corruptions.pixels import blur_along_line, enlarge, smooth, to_bytes

GREY = np.full((20, 32, 32, 3), 128, dtype=np.uint8)  # 61,440 values
TRUNCATED = -0.5  # mean change by truncation to whole levels


def test_gaussian_noise_has_its_deviation_and_no_mean():
    noise = corrupt(GREY, "gaussian_noise", 3, seed=0) - 128.0
    assert abs(noise.std() - 0.08 * 255) < 0.2
    assert abs(noise.mean() - TRUNCATED) < 0.3
    channels = np.corrcoef(noise.reshape(-1, 3).T)
    assert np.abs(channels - np.eye(3)).max() < 0.03


def test_shot_noise_grows_with_the_root_of_the_light():
    for value in (64, 144):
        image = np.full_like(GREY, value)
        noise = corrupt(image, "shot_noise", 5, seed=0) - float(value)
        assert abs(noise.std() - 255 * np.sqrt(value / 255 / 50)) < 0.4
        assert abs(noise.mean() - TRUNCATED) < 0.6


def test_impulse_noise_leaves_the_rest_alone():
    output = corrupt(GREY, "impulse_noise", 5, seed=0)
    values, counts = np.unique(output, return_counts=True)
    assert values.tolist() == [0, 128, 255]
    fractions = counts / output.size
    assert abs(fractions[0] - 0.035) < 0.003
    assert abs(fractions[2] - 0.035) < 0.003


def test_speckle_noise_is_in_proportion():
    assert not corrupt(np.zeros_like(GREY), "speckle_noise", 5, seed=0).any()
    noise = corrupt(GREY // 2, "speckle_noise", 5, seed=0) - 64.0
    assert abs(noise.std() - 0.2 * 64) < 0.2


def point(size: int = 32) -> np.ndarray:
    """White in the middle of black."""
    images = np.zeros((1, size, size, 3), dtype=np.uint8)
    images[0, size // 2, size // 2] = 255
    return images


@pytest.mark.parametrize(
    "name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"]
)
def test_an_even_image_stays_even(name):
    images = np.full((1, 32, 32, 3), (10, 100, 255), dtype=np.uint8)
    for severity in (1, 3, 5):
        assert (corrupt(images, name, severity, seed=0) == images).all()


def test_a_point_out_of_focus_becomes_a_disk():
    output = corrupt(point(), "defocus_blur", 5, seed=0)[0]  # radius 1.5: a pixel, its neighbours
    assert output[15:18, 15:18].tolist() == [[[28] * 3] * 3] * 3  # 255 / 9
    assert output.sum() == 9 * 3 * 28


def test_a_gaussian_point_is_a_gaussian():
    row = corrupt(point(), "gaussian_blur", 5, seed=0)[0, 16, 14:19, 0]
    weights = np.exp(-(np.arange(-4, 5) ** 2) / 2)
    weights /= weights.sum()
    assert row.tolist() == [int(255 * weights[4] * weight) for weight in weights[2:7]]


def test_a_streak_is_half_a_gaussian_to_one_side():
    weights = np.exp(-(np.arange(5) ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    images = np.repeat(point() / np.float32(255), 3, axis=0)
    row, column, diagonal = blur_along_line(
        images, radius=2, sigma=1.5, degrees=np.array([0, 90, 45])
    )
    np.testing.assert_allclose(row[16, 12:17, 0], weights[::-1], rtol=1e-5)
    np.testing.assert_allclose(column[12:17, 16, 0], weights[::-1], rtol=1e-5)
    # Steps of 0, 0.71, 1.41, 2.12 and 2.83 pixels along each axis are 0, 1, 1, 2 and 3.
    expected = [weights[4], weights[3], weights[1] + weights[2], weights[0]]
    np.testing.assert_allclose(np.diagonal(diagonal[13:17, 13:17, 0]), expected, rtol=1e-5)
    np.testing.assert_allclose([one.sum() for one in (row, column, diagonal)], 3, rtol=1e-5)


def test_motion_is_at_most_45_degrees_from_a_row():
    output = corrupt(np.repeat(point(), 60, axis=0), "motion_blur", 3, seed=0)[..., 0] > 0
    rows, columns = output.any(axis=2).sum(axis=1), output.any(axis=1).sum(axis=1)
    assert (columns >= rows).all()
    assert rows.min() == 1
    assert (output.argmax(axis=1).max(axis=1) <= 24).all()


def test_the_centre_is_enlarged():
    images = np.tile(np.arange(4, dtype=np.float32)[None, :, None], (1, 1, 4))
    output = enlarge(images, 2.0)[0]
    # Pixels 1 and 2 become 4, from one to the other.
    np.testing.assert_allclose(output, np.tile([[1], [4 / 3], [5 / 3], [2]], 4), rtol=1e-6)
    assert (enlarge(images, 1.0) == images).all()


def test_zooming_blurs_the_rim_and_keeps_the_middle():
    stripes = np.zeros((1, 64, 64, 3), dtype=np.uint8)
    stripes[:, :, ::4] = 200
    output = corrupt(stripes, "zoom_blur", 5, seed=0)[0, :, :, 0].astype(float)
    assert output[:, 28:36].std() > 2 * output[:, :8].std()


def test_glass_moves_pixels_in_reading_order_from_the_last():
    """Moving groups of pixels at once equals moving one pixel after the other."""
    size, parameters = 18, (0.4, 2, 2)
    images = np.random.default_rng(0).random((3, size, size, 3), dtype=np.float32)
    generators = [np.random.default_rng(number) for number in range(3)]
    output = glass_blur(images, parameters, generators)
    sigma, reach, rounds = parameters
    inner = size - 2 * reach
    for number, image in enumerate(to_bytes(smooth(images, sigma))):
        moves = np.random.default_rng(number).integers(-reach, reach, (rounds, 2, inner, inner))
        for down, right in moves:
            for row in range(inner):
                for column in range(inner):
                    pixel = size - reach - row, size - reach - column
                    neighbour = pixel[0] + down[row, column], pixel[1] + right[row, column]
                    image[pixel] = image[neighbour]
        expected = smooth(image[None].astype(np.float32) / 255, sigma)[0]
        np.testing.assert_allclose(output[number], expected, rtol=0, atol=1e-6)


def saturated(severity: int, *colour: int) -> list[int]:
    images = np.full((1, 32, 32, 3), colour, dtype=np.uint8)
    output = corrupt(images, "saturate", severity, seed=0)
    assert (output == output[:, :1, :1]).all()
    return output[0, 0, 0].tolist()


def test_saturation_moves_all_channels_but_the_highest():
    assert saturated(2, 200, 100, 100) == [200, 190, 190]  # from 0.5 to 0.05
    assert saturated(2, 100, 200, 100) == [190, 200, 190]
    assert saturated(3, 200, 100, 100) == [200, 50, 50]  # to 0.75
    assert saturated(4, 200, 100, 100) == [200, 0, 0]  # to 1.1, which is 1
    assert saturated(4, 100, 100, 100) == [100, 90, 90]  # grey has the hue of red
    assert saturated(5, 0, 0, 0) == [0, 0, 0]
