"""Pairs within a batch."""

import pytest
import torch

from calib.methods.mixing import blend, blended_labels, draw_partners, draw_weight


def test_a_blend_by_hand():
    images = torch.tensor([[40], [80], [120]], dtype=torch.uint8)
    got = blend(images, torch.tensor([1, 2, 0]), 0.75)
    torch.testing.assert_close(got, torch.tensor([[50.0], [90.0], [100.0]]))


def test_labels_of_a_blend_by_hand():
    got = blended_labels(torch.tensor([0, 2, 2]), torch.tensor([1, 2, 0]), 0.7, 3)
    expected = torch.tensor([[0.7, 0.0, 0.3], [0.0, 0.0, 1.0], [0.3, 0.0, 0.7]])
    torch.testing.assert_close(got, expected)


def test_partners_are_each_image_once():
    torch.manual_seed(0)
    assert sorted(draw_partners(torch.zeros(50)).tolist()) == list(range(50))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 20.0])
def test_weights_have_the_moments_of_the_beta_distribution(alpha: float):
    torch.manual_seed(0)
    drawn = torch.tensor([draw_weight(alpha) for _ in range(1000)])
    variance = 1 / (4 * (2 * alpha + 1))
    torch.testing.assert_close(drawn.mean(), torch.tensor(0.5), atol=0.04, rtol=0)
    torch.testing.assert_close(drawn.var(), torch.tensor(variance), atol=0, rtol=0.2)
