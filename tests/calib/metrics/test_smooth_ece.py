"""Smooth ECE: cases with one answer, the kernel written out, the fixed point."""

import numpy as np
import pytest
import torch
from torch import Tensor

from calib.metrics.measures import smooth_error, smoothed_error, spectrum


def random_case(seed: int, samples: int = 300) -> tuple[Tensor, Tensor]:
    """Confidences up to 1 that are right too often below 0.7 and too seldom above."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(3, 1.2, samples)
    confidence[:9] = 1.0
    chance = np.where(confidence < 0.7, confidence + 0.2, confidence - 0.25)
    return torch.from_numpy(confidence), torch.from_numpy((rng.random(samples) < chance) + 0.0)


def written_out(confidence: Tensor, correct: Tensor, width: float, points: int = 20_001) -> float:
    """The definition: a Gaussian around each sample and its mirror images, integrated."""
    t, c = np.linspace(0, 1, points)[:, None], confidence.numpy()
    heights = sum(
        np.exp(-(((t - (2 * turn + side * c)) / width) ** 2) / 2)
        for turn in range(-3, 4)
        for side in (-1, 1)
    ) / (width * np.sqrt(2 * np.pi))
    smoothed = heights @ (confidence - correct).numpy() / len(c)
    return float(np.trapezoid(np.abs(smoothed), dx=1 / (points - 1)))


@pytest.mark.parametrize("place", [0.3, 0.61803, 1.0])
def test_of_one_confidence_it_is_the_gap(place: float):
    confidence = torch.full((8,), place, dtype=torch.float64)
    correct = torch.arange(8).lt(2).double()
    assert smooth_error(confidence, correct) == pytest.approx(abs(place - 0.25), abs=1e-8)


@pytest.mark.parametrize("width", [0.01, 0.08, 0.7])
def test_one_bandwidth_equals_the_kernel_written_out(width: float):
    confidence, correct = random_case(0, samples=60)
    got = smoothed_error(spectrum(confidence, correct), width)
    assert got == pytest.approx(written_out(confidence, correct, width), abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_is_its_own_bandwidth(seed: int):
    confidence, correct = random_case(seed, samples=60)
    found = smooth_error(confidence, correct)
    assert 0.02 < found < 0.3
    assert written_out(confidence, correct, found) == pytest.approx(found, abs=1e-6)


def test_gaps_of_both_signs_side_by_side_partly_cancel():
    # 0.6 always right and 0.64 always wrong: bins would give 0.4 and 0.64; the kernel sees them
    # together, and is at least as wide as what is left of them.
    confidence = torch.tensor([0.6, 0.64]).double().repeat(50)
    correct = torch.tensor([1.0, 0.0]).double().repeat(50)
    found = smooth_error(confidence, correct)
    assert 0.12 < found < 0.2
    assert found == pytest.approx(written_out(confidence, correct, found), abs=1e-6)


def test_perfect_confidence_has_none():
    ones = torch.ones(5, dtype=torch.float64)
    assert smooth_error(ones, ones) == pytest.approx(0, abs=1e-9)
