"""MbLS against hand-computed cases and its formula."""

import math

import pytest
import torch

from calib.losses import build_loss
from tests.calib.losses.formulas import assert_agrees, batch, softmax


def test_by_hand():
    # Distances from the largest logit are 0, 7, 10; beyond the margin of 6 they are 0, 1, 4.
    logits = torch.tensor([[10.0, 3.0, 0.0]])
    got = build_loss("mbls", 3, margin=6, weight=0.3)(logits, torch.tensor([1]))
    cross_entropy = math.log(math.exp(10) + math.exp(3) + 1) - 3
    torch.testing.assert_close(got, torch.tensor(cross_entropy + 0.3 * 5 / 3))


def test_the_gradient_flows_through_the_largest_logit():
    logits = torch.tensor([[100.0, 0.0, 0.0, 99.0]], requires_grad=True)
    loss = build_loss("mbls", 4, margin=6, weight=1)
    plain = build_loss("ce", 4)
    (got,) = torch.autograd.grad(loss(logits, torch.tensor([0])), logits)
    (without,) = torch.autograd.grad(plain(logits, torch.tensor([0])), logits)
    torch.testing.assert_close(got - without, torch.tensor([[0.5, -0.25, -0.25, 0.0]]))


def test_within_the_margin_it_is_cross_entropy():
    logits, targets = torch.tensor([[6.0, 0.0, 3.0]]), torch.tensor([2])
    got = build_loss("mbls", 3)(logits, targets)
    torch.testing.assert_close(got, build_loss("ce", 3)(logits, targets), rtol=0, atol=0)


@pytest.mark.parametrize("params", [{}, {"margin": 2}, {"margin": 0, "weight": 1.5}])
def test_equals_its_formula(params: dict):
    margin, weight = params.get("margin", 6), params.get("weight", 0.1)

    def formula(z, y, held):
        beyond = [max(0, max(z) - z_k - margin) for z_k in z]
        return -math.log(softmax(z)[y]) + weight * sum(beyond) / len(z)

    assert_agrees(build_loss("mbls", 5, **params), formula, *batch())
