"""The scale that makes the labels of a small generator's series soft."""

import pytest
import torch

from semix.data.labels import sharpen
from semix.pipeline.config import EncoderConfig, GeneratorConfig
from semix.pipeline.standins.softness import (
    ALPHAS,
    SERIES,
    SOFT,
    relative_entropy,
    scale_of_entropy,
    series_weights,
    soft_scale,
)


def test_the_entropy_of_labels_is_told_in_that_of_an_even_one():
    assert relative_entropy(torch.tensor([0.5, 0.5]), 20.0) == pytest.approx(1)
    # One even label, and one of 3/4, whose entropy is 0.8113 bits.
    scale, weight = 4.0, 0.5 + torch.log(torch.tensor(3.0)) / 4
    assert sharpen(weight[None], scale).item() == pytest.approx(0.75)
    assert relative_entropy(torch.tensor([0.5, weight.item()]), scale) == pytest.approx(
        0.9056, abs=1e-4
    )


@pytest.mark.parametrize(("spread", "scale"), [(1.0, 3.1), (4.0, 0.78)])
def test_weights_that_reach_further_want_a_smaller_scale(spread, scale):
    weights = 0.5 + spread * (torch.linspace(0, 1, 8) - 0.5)
    result = scale_of_entropy(weights, SOFT)
    assert relative_entropy(weights, result) == pytest.approx(SOFT, abs=0.01)
    assert result == pytest.approx(scale, abs=0.05)


def test_series_of_a_generator_get_labels_of_that_softness(hasty_standins, digits):
    generator = GeneratorConfig(model=str(hasty_standins.diffusion), steps=2)
    clip = EncoderConfig(model=f"local-dir:{hasty_standins.clip}")
    weights = series_weights(generator, clip, digits)
    assert weights.shape == (SERIES, ALPHAS) and weights.isfinite().all()
    assert torch.equal(weights, series_weights(generator, clip, digits))
    scale = soft_scale(generator, clip, digits)
    assert scale in (0.1, 20.0) or relative_entropy(weights, scale) == pytest.approx(SOFT, abs=0.02)
