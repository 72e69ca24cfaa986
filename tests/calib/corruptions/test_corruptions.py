"""Every corruption: any size, the same pixels however images are divided, and more damage."""

import itertools

import numpy as np
import pytest

from semix.calib.corruptions import EXTRA, STANDARD, corrupt
from semix.calib.corruptions.severities import PUBLISHED, published_constants
from semix.data.errors import InputError
from semix.data.real import RealDataConfig, load_real

# For those taken out a higher severity is another kind of damage, not always a larger difference:
# glass_blur and elastic_transform trade reach for fineness, frost dims the image, saturate
# goes from grey to garish, spatter from water to mud.
MONOTONE = sorted(
    {*STANDARD, *EXTRA}
    - {"glass_blur", "elastic_transform", "frost", "pixelate", "saturate", "spatter"}
)


def digits(size: int, count: int) -> np.ndarray:
    real = load_real(RealDataConfig(name="digits", image_size=size))
    return real.test.images(range(count))


def coloured(size: int, count: int) -> np.ndarray:
    """Smooth colours with a little grain."""
    generator = np.random.default_rng(0)
    top, bottom = generator.uniform(0, 230, (2, count, 1, 2, 3))
    fraction = np.linspace(0, 1, size)[:, None]
    left, right = np.split(top + fraction[:, None] * (bottom - top), 2, axis=2)  # [N, S, 1, 3]
    grain = generator.uniform(0, 25, (count, size, size, 3))
    return (left + fraction * (right - left) + grain).astype(np.uint8)


def test_there_are_fifteen_and_four():
    assert len(STANDARD) == 15
    assert EXTRA == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    assert STANDARD[0] == "gaussian_noise"
    assert STANDARD[-1] == "jpeg_compression"
    assert set(PUBLISHED) == {*STANDARD, *EXTRA}
    for name, sizes in PUBLISHED.items():
        assert list(sizes) == [32, 64, 224], name
        assert [len(levels) for levels in sizes.values()] == [5, 5, 5], name


def test_constants_are_those_of_the_nearest_published_size():
    constants = {
        size: published_constants("gaussian_noise", 5, size=size) for size in (16, 45, 46, 119, 120)
    }
    assert constants == {16: 0.1, 45: 0.1, 46: 0.18, 119: 0.18, 120: 0.38}
    assert published_constants("motion_blur", 1, size=32) == (6, 1)


@pytest.mark.parametrize("size", [16, 32, 64, 224])
@pytest.mark.parametrize("name", STANDARD + EXTRA)
def test_images_of_any_size_are_changed(name, size):
    images = coloured(size, 2)
    before = images.copy()
    for severity in (1, 5):
        output = corrupt(images, name, severity, seed=0)
        assert (output.shape, output.dtype) == (images.shape, np.uint8)
        assert (output != images).any(axis=(1, 2, 3)).all()
    assert (images == before).all()


@pytest.mark.parametrize("name", STANDARD + EXTRA)
def test_an_image_does_not_depend_on_those_beside_it(name, monkeypatch):
    images = coloured(32, 7)
    for severity in (1, 3):
        expected = corrupt(images, name, severity, seed=3, first=10)
        chunks = [
            corrupt(images[start:stop], name, severity, seed=3, first=10 + start)
            for start, stop in ((0, 1), (1, 3), (3, 7))
        ]
        assert (np.concatenate(chunks) == expected).all()
    monkeypatch.setattr("semix.calib.corruptions.STACK_VALUES", 2 * images[0].size)
    assert (corrupt(images, name, severity, seed=3, first=10) == expected).all()


@pytest.mark.parametrize("name", sorted({*STANDARD, *EXTRA} - {"spatter"}))
def test_random_choices_follow_seed_and_number(name):
    """Corruptions without random choices are the same for every seed."""
    images = np.repeat(coloured(32, 1), 2, axis=0)
    output = corrupt(images, name, 3, seed=0)
    fixed = "defocus_blur zoom_blur brightness contrast pixelate jpeg_compression gaussian_blur"
    if name in (*fixed.split(), "saturate"):
        assert (output == corrupt(images, name, 3, seed=1)).all()
        assert (output[0] == output[1]).all()
    else:
        assert (output[0] != output[1]).any()
        assert (output != corrupt(images, name, 3, seed=1)).any(axis=(1, 2, 3)).all()
        assert (output[1] == corrupt(images[:1], name, 3, seed=0, first=1)[0]).all()


@pytest.mark.parametrize("name", MONOTONE)
def test_a_higher_severity_is_farther_from_the_image(name):
    images = digits(32, 40)
    errors = []
    for severity in (1, 2, 3, 4, 5):
        output = corrupt(images, name, severity, seed=0).astype(float)
        errors.append(((output - images) ** 2).mean())
    assert errors[0] > 0
    assert all(low < high for low, high in itertools.pairwise(errors)), errors


def test_no_images_are_none():
    assert corrupt(coloured(32, 1)[:0], "snow", 1, seed=0).shape == (0, 32, 32, 3)


def test_what_cannot_be_done_is_named():
    images = coloured(32, 1)
    with pytest.raises(InputError, match=r"^corruption = rain: choose one of gaussian_noise, "):
        corrupt(images, "rain", 1, seed=0)
    for severity in (0, 6):
        with pytest.raises(InputError, match=rf"^severity = {severity}: choose 1, 2, 3, 4 or 5"):
            corrupt(images, "snow", severity, seed=0)
    with pytest.raises(InputError, match=r"^image_size = 15: corruptions need at least 16 pixels"):
        corrupt(images[:, :15, :15], "snow", 1, seed=0)
    with pytest.raises(ValueError, match=r"images are float64 \[1, 32, 32, 3\]: give uint8"):
        corrupt(images / 255, "snow", 1, seed=0)
    with pytest.raises(ValueError, match=r"are uint8 \[1, 32, 30, 3\]"):
        corrupt(images[:, :, :30], "snow", 1, seed=0)
