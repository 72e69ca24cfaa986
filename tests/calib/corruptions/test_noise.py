"""Noise whose mean, spread and share are those that the constants say."""

import numpy as np

from calib.corruptions import corrupt

GREY = np.full((20, 32, 32, 3), 128, dtype=np.uint8)  # 61,440 values
TRUNCATED = -0.5  # what truncation to whole levels takes on average


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
    found = corrupt(GREY, "impulse_noise", 5, seed=0)
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [0, 128, 255]
    share = counts / found.size
    assert abs(share[0] - 0.035) < 0.003
    assert abs(share[2] - 0.035) < 0.003


def test_speckle_noise_is_in_proportion():
    assert not corrupt(np.zeros_like(GREY), "speckle_noise", 5, seed=0).any()
    noise = corrupt(GREY // 2, "speckle_noise", 5, seed=0) - 64.0
    assert abs(noise.std() - 0.2 * 64) < 0.2
