"""Focal losses against hand-computed cases, their formula and torchvision."""

import math

import pytest
import torch
from torchvision.ops import sigmoid_focal_loss

from calib.losses import build_loss
from tests.calib.losses.formulas import assert_agrees, batch, softmax


def test_focal_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).log()
    got = build_loss("focal", 3, gamma=2)(logits, torch.tensor([0, 1]))
    expected = -(0.5**2 * math.log(0.5) + 0.8**2 * math.log(0.2)) / 2
    torch.testing.assert_close(got, torch.tensor(expected))


def test_focal_of_gamma_zero_is_cross_entropy():
    logits, targets = batch()
    got = build_loss("focal", 5, gamma=0)(logits, targets)
    torch.testing.assert_close(got, build_loss("ce", 5)(logits, targets))


@pytest.mark.parametrize("gamma", [0.5, 1, 3])
def test_focal_of_two_classes_equals_torchvision(gamma: float):
    logits, targets = batch(classes=2)
    peer = sigmoid_focal_loss(
        logits[:, 1] - logits[:, 0], targets.float(), alpha=-1, gamma=gamma, reduction="mean"
    )
    torch.testing.assert_close(build_loss("focal", 2, gamma=gamma)(logits, targets), peer)


@pytest.mark.parametrize("gamma", [0.5, 1, 3, 5])
def test_focal_equals_its_formula(gamma: float):
    def formula(z, y, held):
        p = softmax(z)[y]
        return -((1 - p) ** gamma) * math.log(p)

    assert_agrees(build_loss("focal", 5, gamma=gamma), formula, *batch())


def test_flsd53_by_hand():
    # p_y = 0.19 takes gamma 5, 0.21 and 0.6 take gamma 3.
    p = torch.tensor([[0.19, 0.81], [0.21, 0.79], [0.6, 0.4]])
    got = build_loss("flsd53", 2)(p.log(), torch.tensor([0, 0, 0]))
    parts = [0.81**5 * math.log(0.19), 0.79**3 * math.log(0.21), 0.4**3 * math.log(0.6)]
    torch.testing.assert_close(got, torch.tensor(-sum(parts) / 3))


def test_flsd53_equals_its_formula():
    def formula(z, y, held):
        p = softmax(z)[y]
        gamma = 5 if softmax(held)[y] < 0.2 else 3
        return -((1 - p) ** gamma) * math.log(p)

    assert_agrees(build_loss("flsd53", 5), formula, *batch(samples=20))
