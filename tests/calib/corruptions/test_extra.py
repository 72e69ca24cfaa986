"""Saturation and spatter, worked out by hand."""

import numpy as np

from calib.corruptions import corrupt
from calib.corruptions.weather import MUD, WATER, _distance, _equalised, _rims, spatter

WHITE = np.full((20, 32, 32, 3), 255, dtype=np.uint8)


def saturated(severity: int, *colour: int) -> list[int]:
    images = np.full((1, 32, 32, 3), colour, dtype=np.uint8)
    found = corrupt(images, "saturate", severity, seed=0)
    assert (found == found[:, :1, :1]).all()
    return found[0, 0, 0].tolist()


def test_saturation_moves_all_channels_but_the_highest():
    assert saturated(2, 200, 100, 100) == [200, 190, 190]  # from 0.5 to 0.05
    assert saturated(2, 100, 200, 100) == [190, 200, 190]
    assert saturated(3, 200, 100, 100) == [200, 50, 50]  # to 0.75
    assert saturated(4, 200, 100, 100) == [200, 0, 0]  # to 1.1, which is 1
    assert saturated(4, 100, 100, 100) == [100, 90, 90]  # grey has the hue of red
    assert saturated(5, 0, 0, 0) == [0, 0, 0]


def test_mud_covers():
    found = corrupt(WHITE, "spatter", 5, seed=0)
    covered = (found != 255).any(axis=(1, 2, 3))
    assert covered.all()
    values = found[found[..., 0] < 255].astype(float)
    share = (255 - values) / (255 - 255 * MUD)
    assert share.max() <= 1.02
    assert share.min() >= 0.79  # less cover than 0.8 is none
    assert np.ptp(share, axis=1).max() < 0.03


def test_water_shines_and_leaves_most_alone():
    found = corrupt(np.zeros_like(WHITE), "spatter", 1, seed=0)
    wet = found[..., 0] > 0
    assert 0.001 < wet.mean() < 0.1
    brightest = found.max(axis=(0, 1, 2))
    assert brightest.tolist() == (WATER * 0.5 * 255).astype(int).tolist()


def test_an_image_without_drops_stays_as_it_is():
    images = np.full((2, 32, 32, 3), 0.25, dtype=np.float32)
    generators = [np.random.default_rng(number) for number in range(2)]
    for is_mud in (False, True):
        found = spatter(images, (0.1, 0.01, 1, 0.7, 0.5, is_mud), generators)
        assert (found == images).all()


def test_distances_are_those_of_chess():
    rim = np.zeros((4, 4), dtype=bool)
    rim[0, 0] = True
    expected = [
        [0, 1, 2, 3],
        [1, 1.4, 2.1969, 3.1969],
        [2, 2.1969, 2.8, 3.5969],
        [3, 3.1969, 3.5969, 4.2],
    ]
    np.testing.assert_allclose(_distance(rim), expected)
    assert (_distance(rim & False) == 20).all()


def test_a_histogram_is_spread():
    assert _equalised(np.array([[3, 3], [5, 9]])).tolist() == [[0, 0], [128, 255]]
    assert _equalised(np.array([[3, 3]])).tolist() == [[3, 3]]


def test_rims_are_where_levels_change_most():
    levels = np.zeros((3, 9, 9), dtype=np.uint8)
    levels[0, 2:7, 2:7] = 200
    levels[1, 2:7, 2:7] = 12  # 4 x 12 is less than the weak threshold
    levels[2, :, 5:] = 30  # 4 x 30 lies between the two: no strong pixel joins it
    rims = _rims(levels)
    assert rims[1:].sum() == 0
    ring = rims[0, 1:8, 1:8]
    assert ring.sum() >= 12
    assert not rims[0, 4, 4]
    assert not rims[0, 0].any()
    levels[2, 0, 5:] = 200
    assert _rims(levels)[2, :, 4:6].any(axis=1).all()  # now one does
