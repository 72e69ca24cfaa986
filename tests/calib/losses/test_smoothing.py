"""Label smoothing, MbLS and ACLS against hand-computed cases, their formulas and torch."""

import math

import pytest
import torch
from torch import nn

from semix.calib.losses import build_loss
from tests.calib.losses.formulas import assert_agrees, batch, softmax


def test_label_smoothing_by_hand():
    logits = torch.tensor([[0.8, 0.2]]).log()
    got = build_loss("ls", 2, smoothing=0.1)(logits, torch.tensor([0]))
    # The true class keeps 1 - 0.1 + 0.1/2.
    torch.testing.assert_close(got, torch.tensor(-0.95 * math.log(0.8) - 0.05 * math.log(0.2)))


@pytest.mark.parametrize("smoothing", [0.0, 0.05, 0.3, 1])
def test_label_smoothing_equals_torch(smoothing: float):
    logits, targets = batch()
    peer = nn.CrossEntropyLoss(label_smoothing=smoothing)
    got = build_loss("ls", 5, smoothing=smoothing)(logits, targets)
    torch.testing.assert_close(got, peer(logits, targets))


def test_mbls_by_hand():
    # Distances from the largest logit are 0, 7, 10; beyond the margin of 6 they are 0, 1, 4.
    logits = torch.tensor([[10.0, 3.0, 0.0]])
    got = build_loss("mbls", 3, margin=6, weight=0.3)(logits, torch.tensor([1]))
    cross_entropy = math.log(math.exp(10) + math.exp(3) + 1) - 3
    torch.testing.assert_close(got, torch.tensor(cross_entropy + 0.3 * 5 / 3))


def test_the_gradient_of_mbls_flows_through_the_largest_logit():
    logits = torch.tensor([[100.0, 0.0, 0.0, 99.0]], requires_grad=True)
    loss = build_loss("mbls", 4, margin=6, weight=1)
    plain = build_loss("ce", 4)
    (got,) = torch.autograd.grad(loss(logits, torch.tensor([0])), logits)
    (without,) = torch.autograd.grad(plain(logits, torch.tensor([0])), logits)
    torch.testing.assert_close(got - without, torch.tensor([[0.5, -0.25, -0.25, 0.0]]))


def test_mbls_within_the_margin_is_cross_entropy():
    logits, targets = torch.tensor([[6.0, 0.0, 3.0]]), torch.tensor([2])
    got = build_loss("mbls", 3)(logits, targets)
    torch.testing.assert_close(got, build_loss("ce", 3)(logits, targets), rtol=0, atol=0)


@pytest.mark.parametrize("params", [{}, {"margin": 2}, {"margin": 0, "weight": 1.5}])
def test_mbls_equals_its_formula(params: dict):
    margin, weight = params.get("margin", 6), params.get("weight", 0.1)

    def formula(z, y, detached):
        beyond = [max(0, max(z) - z_k - margin) for z_k in z]
        return -math.log(softmax(z)[y]) + weight * sum(beyond) / len(z)

    assert_agrees(build_loss("mbls", 5, **params), formula, *batch())


def test_acls_by_hand():
    # The largest logit is 2 above the margin; the others are 3 and 7 below it: 0 and 3 beyond 4.
    logits = torch.tensor([[6.0, 3.0, -1.0]])
    loss = build_loss("acls", 3, margin=4, positive=0.5, negative=0.2, weight=0.7)
    cross_entropy = math.log(math.exp(6) + math.exp(3) + math.exp(-1)) - 3
    penalty = 0.5 * 2**2 + 0.2 * (0 + 3**2) / 2
    torch.testing.assert_close(
        loss(logits, torch.tensor([1])), torch.tensor(cross_entropy + 0.7 * penalty)
    )


def test_logits_that_tie_for_the_largest_each_count_as_it():
    logits = torch.tensor([[6.0, 6.0, -1.0]])
    loss = build_loss("acls", 3, margin=4, positive=1, negative=1, weight=1)
    cross_entropy = math.log(2 * math.exp(6) + math.exp(-1)) - 6
    got = loss(logits, torch.tensor([1]))
    torch.testing.assert_close(got, torch.tensor(cross_entropy + 2 * 2**2 + 3**2 / 2))


def test_acls_within_the_margin_is_cross_entropy():
    logits, targets = torch.tensor([[6.0, -4.0, 3.0], [10.0, 1.0, 0.0]]), torch.tensor([2, 0])
    got = build_loss("acls", 3)(logits, targets)
    torch.testing.assert_close(got, build_loss("ce", 3)(logits, targets), rtol=0, atol=0)


@pytest.mark.parametrize(
    "params", [{}, {"margin": 2}, {"margin": 0, "positive": 0.3, "negative": 2, "weight": 1.5}]
)
def test_acls_equals_its_formula(params: dict):
    margin, weight = params.get("margin", 10), params.get("weight", 0.1)
    positive, negative = params.get("positive", 1), params.get("negative", 0.1)

    def formula(z, y, detached):
        top = z.argmax()
        others = [max(0, max(detached) - z_k - margin) ** 2 for k, z_k in enumerate(z) if k != top]
        penalty = positive * max(0, z[top] - margin) ** 2
        penalty += negative * sum(others) / (len(z) - 1)
        return -math.log(softmax(z)[y]) + weight * penalty

    assert_agrees(build_loss("acls", 5, **params), formula, *batch(scale=8))
