"""Dual focal loss against hand-computed cases and its formula."""

import math

import pytest
import torch

from calib.losses import build_loss
from tests.calib.losses.formulas import assert_agrees, batch, softmax


@pytest.mark.parametrize(
    ("probabilities", "target", "base"),
    [
        ([0.5, 0.3, 0.2], 0, 1 - 0.5 + 0.3),
        ([0.5, 0.3, 0.2], 1, 1 - 0.3 + 0.2),  # the larger 0.5 does not count
        ([0.5, 0.3, 0.2], 2, 1 - 0.2),  # nothing is below it
        ([0.4, 0.4, 0.2], 0, 1 - 0.4 + 0.2),  # an equal one does not count
        ([0.5, 0.25, 0.25], 0, 1 - 0.5 + 0.25),
    ],
)
def test_by_hand(probabilities: list[float], target: int, base: float):
    logits = torch.tensor([probabilities]).log()
    got = build_loss("dual_focal", 3, gamma=2)(logits, torch.tensor([target]))
    torch.testing.assert_close(got, torch.tensor(-(base**2) * math.log(probabilities[target])))


def test_all_classes_equal():
    got = build_loss("dual_focal", 4, gamma=3)(torch.zeros(1, 4), torch.tensor([2]))
    torch.testing.assert_close(got, torch.tensor(0.75**3 * math.log(4)))


@pytest.mark.parametrize("params", [{}, {"gamma": 0}, {"gamma": 0.5}, {"gamma": 2}])
def test_equals_its_formula(params: dict):
    gamma = params.get("gamma", 5)

    def formula(z, y, held):
        p = softmax(z)
        below = [p_k for p_k in p if p_k < p[y]]
        return -((1 - p[y] + max(below, default=0)) ** gamma) * math.log(p[y])

    assert_agrees(build_loss("dual_focal", 5, **params), formula, *batch())
