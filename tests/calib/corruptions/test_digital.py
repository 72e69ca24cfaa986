"""Brightness, contrast, distortion, coarse pixels and JPEG, worked out by hand."""

import io

import numpy as np
from PIL import Image

from semix.calib.corruptions import corrupt
from semix.calib.corruptions.digital import _affine_coordinates
from semix.calib.corruptions.pixels import interpolate_at, mirrored, reflected


def even(*colour: int, size: int = 32) -> np.ndarray:
    return np.full((1, size, size, 3), colour, dtype=np.uint8)


def colour(images: np.ndarray) -> list[int]:
    assert (images == images[:, :1, :1]).all()
    return images[0, 0, 0].tolist()


def test_brightness_raises_the_value_alone():
    # The value 100 / 255 becomes 176.5 / 255: all channels times 1.765.
    assert colour(corrupt(even(100, 50, 0), "brightness", 5, seed=0)) == [176, 88, 0]
    assert colour(corrupt(even(0, 0, 0), "brightness", 5, seed=0)) == [76, 76, 76]
    assert colour(corrupt(even(250, 125, 0), "brightness", 5, seed=0)) == [255, 127, 0]


def test_contrast_is_the_distance_from_the_mean_of_each_channel():
    images = even(0, 0, 30)
    images[:, ::2] = (200, 100, 30)
    output = corrupt(images, "contrast", 2, seed=0)  # half the distance remains
    assert colour(output[:, ::2]) == [150, 75, 30]
    assert colour(output[:, 1::2]) == [50, 25, 30]


def test_pixels_become_coarse():
    images = even(0, 0, 0, size=64)
    images[:, ::2, ::2] = 240
    images[:, 1::2, 1::2] = 80
    assert colour(corrupt(images, "pixelate", 5, seed=0)) == [80, 80, 80]  # means of 2 x 2
    images[:, :32] = 0
    output = corrupt(images, "pixelate", 5, seed=0)
    assert not output[:, :32].any()
    assert (output[:, 32:] == 80).all()


def test_jpeg_is_pillows_of_the_given_quality():
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    for severity, quality in enumerate((80, 65, 58, 50, 40), start=1):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        output = corrupt(image[None], "jpeg_compression", severity, seed=0)[0]
        assert (output == np.asarray(Image.open(file))).all()


def test_borders_mirror_at_the_pixel_or_at_the_edge():
    index = np.arange(-4, 9)
    assert mirrored(index, 4).tolist() == [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1, 2]
    assert reflected(index, 4).tolist() == [3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0, 0]


def test_images_are_read_between_their_pixels():
    images = np.array([[0.0, 4.0], [8.0, 20.0]], dtype=np.float32)[None, :, :, None]
    rows, columns = np.array([[[0.0, 0.5], [1.0, 0.25]]]), np.array([[[0.5, 0.0], [-0.5, 1.0]]])
    output = interpolate_at(images, rows, columns, border=reflected)[0, :, :, 0]
    assert output.tolist() == [[2.0, 4.0], [8.0, 8.0]]
    assert interpolate_at(images, rows, columns, border=mirrored)[0, 1, 0, 0] == 14.0


def test_an_affine_map_takes_the_corners_where_it_says():
    rows, columns = _affine_coordinates(np.zeros((1, 3, 2)), 8)
    assert np.allclose(rows[0], np.indices((8, 8))[0])
    assert np.allclose(columns[0], np.indices((8, 8))[1])
    rows, columns = _affine_coordinates(np.tile([2.0, -1.0], (1, 3, 1)), 8)
    assert np.allclose(rows[0, 3, 3], 4)  # what is here was one row below
    assert np.allclose(columns[0, 3, 3], 1)  # and two columns to the left
    # Of the corners (x, y) = (6, 6), (6, 2) and (2, 2) the first goes one column to the right.
    rows, columns = _affine_coordinates(np.array([[[1.0, 0], [0, 0], [0, 0]]]), 8)
    corners = [(columns[0, y, x], rows[0, y, x]) for x, y in ((7, 6), (6, 2), (2, 2))]
    assert np.allclose(corners, [(6, 6), (6, 2), (2, 2)])


def test_elastic_is_affine_at_first_and_local_then():
    """The first severity turns a ramp from left to right into a plane."""
    ramp = np.tile(np.arange(0, 256, 8, dtype=np.uint8)[None, None, :, None], (20, 32, 1, 3))

    def bend(severity: int) -> float:
        output = corrupt(ramp, "elastic_transform", severity, seed=0)[:, 10:22, 10:22, 0]
        second = np.diff(output.astype(float), n=2, axis=1)
        return float(np.abs(second).mean())

    assert bend(1) < 1  # what truncation leaves
    assert bend(5) > 2
