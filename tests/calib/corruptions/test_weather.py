"""Snow, frost, fog and spatter: what they add, and plasma worked out by hand."""

import numpy as np

from semix.calib.corruptions import corrupt
from semix.calib.corruptions.pixels import plasma
from semix.calib.corruptions.weather import MUD, WATER, _distance, _equalised, _rims, spatter

BLACK = np.zeros((30, 32, 32, 3), dtype=np.uint8)


def test_plasma_of_two_pixels_by_hand():
    centre, right, below = np.random.default_rng(7).uniform(-1, 1, 3)
    # The corner is 0; each midpoint is the mean of its neighbours, beyond the edge too, and noise.
    field = np.array([[0, centre / 2 + right], [centre / 2 + below, centre]])
    expected = (field - field.min()) / (field.max() - field.min())
    output = plasma(2, 3.0, [np.random.default_rng(7)])
    np.testing.assert_allclose(output[0, :, :, 0], expected, atol=1e-6)


def test_the_next_level_of_plasma_is_weaker_by_the_square_of_the_decay():
    noise = np.random.default_rng(7).uniform(-1, 1, 15)
    centre, right, below = noise[:3]
    coarse = np.array([[0, centre / 2 + right], [centre / 2 + below, centre]])
    centres, rights, belows = noise[3:].reshape(3, 2, 2) / 3**2
    field = np.zeros((4, 4))
    field[::2, ::2] = coarse
    for row in range(2):
        for column in range(2):
            field[2 * row + 1, 2 * column + 1] = coarse.mean() + centres[row, column]
    for row in range(2):
        for column in range(2):
            r, c = 2 * row, 2 * column  # a corner; beyond the edge the field begins again
            beside = field[r, c] + field[r, (c + 2) % 4] + field[r - 1, c + 1] + field[r + 1, c + 1]
            under = field[r, c] + field[(r + 2) % 4, c] + field[r + 1, c - 1] + field[r + 1, c + 1]
            field[r, c + 1] = beside / 4 + rights[row, column]
            field[r + 1, c] = under / 4 + belows[row, column]
    expected = (field - field.min()) / (field.max() - field.min())
    output = plasma(4, 3.0, [np.random.default_rng(7)])
    np.testing.assert_allclose(output[0, :, :, 0], expected, atol=1e-6)


def test_plasma_gets_finer_as_it_decays_less():
    def roughness(decay: float) -> float:
        fields = plasma(64, decay, [np.random.default_rng(number) for number in range(10)])
        assert fields.shape == (10, 64, 64, 1)
        assert fields.min(axis=(1, 2, 3)).tolist() == [0] * 10
        assert fields.max(axis=(1, 2, 3)).tolist() == [1] * 10
        return float(np.abs(np.diff(fields, axis=1)).mean())

    assert roughness(1.4) > 1.5 * roughness(2) > 1.5 * roughness(3)


def test_fog_keeps_the_brightest_value_and_leaves_black_alone():
    assert not corrupt(BLACK, "fog", 5, seed=0).any()
    images = BLACK.copy()
    images[:, :, :16] = 200
    output = corrupt(images, "fog", 5, seed=0)
    assert output.max() <= 200
    # All of it is 200 (x + 1.5 p) / (200 / 255 + 1.5) with p from 0 to 1.
    dark = output[:, :, 16:].astype(float)
    ratio = (200 / 255) / (200 / 255 + 1.5)
    assert dark.max() <= 255 * 1.5 * ratio
    assert dark.std() > 20


def test_snow_is_white_streaks_that_come_twice():
    output = corrupt(BLACK, "snow", 2, seed=0)
    whitened = int(0.1 * 0.5 * 255)  # a tenth of the way to half white
    assert output.min() == whitened
    assert (output == output[..., :1]).all()
    turned = output[:, ::-1, ::-1]
    assert (np.abs(output.astype(int) - turned) <= 1).all()
    flakes = output[..., 0] > whitened
    assert 0.02 < flakes.mean() < 0.5
    assert np.unique(flakes.sum(axis=(1, 2))).size > 5


def test_frost_is_ice_of_many_kinds_over_a_dimmed_image():
    output = corrupt(BLACK, "frost", 5, seed=0).astype(float) / 0.45
    means, colours = output.mean(axis=(1, 2, 3)), output.mean(axis=(0, 1, 2))
    assert 0.4 * 255 < means.min() < 0.55 * 255 < 0.7 * 255 < means.max() < 0.85 * 255
    assert colours[0] < colours[1] < colours[2]  # bluish
    assert (output.std(axis=(1, 2)) > 10).all()
    white = corrupt(BLACK + 255, "frost", 5, seed=0)
    # The same ice beside 0.75 of white: 191.25 levels more, up to white.
    added = np.minimum(output * 0.45 + 191.25, 255)
    assert np.abs(white - added).max() <= 1.5


WHITE = np.full((20, 32, 32, 3), 255, dtype=np.uint8)


def test_mud_covers():
    output = corrupt(WHITE, "spatter", 5, seed=0)
    covered = (output != 255).any(axis=(1, 2, 3))
    assert covered.all()
    values = output[output[..., 0] < 255].astype(float)
    cover = (255 - values) / (255 - 255 * MUD)
    assert cover.max() <= 1.02
    assert cover.min() >= 0.79  # less cover than 0.8 is none
    assert np.ptp(cover, axis=1).max() < 0.03


def test_water_shines_and_leaves_most_alone():
    output = corrupt(np.zeros_like(WHITE), "spatter", 1, seed=0)
    wet = output[..., 0] > 0
    assert 0.001 < wet.mean() < 0.1
    brightest = output.max(axis=(0, 1, 2))
    assert brightest.tolist() == (WATER * 0.5 * 255).astype(int).tolist()


def test_an_image_without_drops_stays_as_it_is():
    images = np.full((2, 32, 32, 3), 0.25, dtype=np.float32)
    generators = [np.random.default_rng(number) for number in range(2)]
    for is_mud in (False, True):
        output = spatter(images, (0.1, 0.01, 1, 0.7, 0.5, is_mud), generators)
        assert (output == images).all()


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
