"""Focal loss, FLSD, dual focal loss and AdaFocal by hand, by formula and against torchvision."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from semix.calib.losses import build_loss
from semix.calib.losses.base import Outputs
from semix.calib.losses.focal import AdaFocal
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
    def formula(z, y, detached):
        p = softmax(z)[y]
        return -((1 - p) ** gamma) * math.log(p)

    assert_agrees(build_loss("focal", 5, gamma=gamma), formula, *batch())


def test_flsd53_by_hand():
    # p_y = 0.19 takes gamma 5, 0.21 and 0.6 take gamma 3.
    p = torch.tensor([[0.19, 0.81], [0.21, 0.79], [0.6, 0.4]])
    got = build_loss("flsd53", 2)(p.log(), torch.tensor([0, 0, 0]))
    terms = [0.81**5 * math.log(0.19), 0.79**3 * math.log(0.21), 0.4**3 * math.log(0.6)]
    torch.testing.assert_close(got, torch.tensor(-sum(terms) / 3))


def test_flsd53_equals_its_formula():
    def formula(z, y, detached):
        p = softmax(z)[y]
        gamma = 5 if softmax(detached)[y] < 0.2 else 3
        return -((1 - p) ** gamma) * math.log(p)

    assert_agrees(build_loss("flsd53", 5), formula, *batch(samples=20))


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
def test_dual_focal_by_hand(probabilities: list[float], target: int, base: float):
    logits = torch.tensor([probabilities]).log()
    got = build_loss("dual_focal", 3, gamma=2)(logits, torch.tensor([target]))
    torch.testing.assert_close(got, torch.tensor(-(base**2) * math.log(probabilities[target])))


def test_dual_focal_of_equal_classes():
    got = build_loss("dual_focal", 4, gamma=3)(torch.zeros(1, 4), torch.tensor([2]))
    torch.testing.assert_close(got, torch.tensor(0.75**3 * math.log(4)))


@pytest.mark.parametrize("params", [{}, {"gamma": 0}, {"gamma": 0.5}, {"gamma": 2}])
def test_dual_focal_equals_its_formula(params: dict):
    gamma = params.get("gamma", 5)

    def formula(z, y, detached):
        p = softmax(z)
        below = [p_k for p_k in p if p_k < p[y]]
        return -((1 - p[y] + max(below, default=0)) ** gamma) * math.log(p[y])

    assert_agrees(build_loss("dual_focal", 5, **params), formula, *batch())


class Validation:
    """Feedback that returns the same outputs whatever the epoch."""

    def __init__(self, confidence: list[float], right: list[int]) -> None:
        p = torch.tensor(confidence)
        logits = torch.stack([p, 1 - p], dim=1).log()
        self.result = Outputs(logits, torch.zeros(len(p), 1), 1 - torch.tensor(right))

    def outputs(self, split: str) -> Outputs:
        assert split == "validation"
        return self.result


def ada_focal(classes: int = 2, **params: object) -> AdaFocal:
    loss = build_loss("ada_focal", classes, **params)
    assert isinstance(loss, AdaFocal)
    return loss


def set_gammas(loss: AdaFocal, *gammas: float) -> AdaFocal:
    loss.gammas.copy_(torch.tensor(gammas))
    return loss


def of(p: float) -> tuple[Tensor, Tensor]:
    """Logits of one sample whose class has probability p, and that class."""
    return torch.tensor([[p, 1 - p]]).log(), torch.tensor([0])


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.3, 0.7**2 * -math.log(0.3)),
        (0.7, 1.7**1.5 * -math.log(0.7)),  # a negative gamma turns 1 - p into 1 + p
    ],
)
def test_ada_focal_and_its_inverse_by_hand(p: float, expected: float):
    loss = set_gammas(ada_focal(bins=2), 2.0, -1.5)
    torch.testing.assert_close(loss(*of(p)), torch.tensor(expected))


def test_ada_focal_starts_as_focal_loss_of_gamma_one():
    logits, targets = batch()
    got = ada_focal(5)(logits, targets)
    torch.testing.assert_close(got, build_loss("focal", 5, gamma=1.0)(logits, targets))


def test_bins_start_with_equal_width_and_hold_their_lower_edge():
    loss = set_gammas(ada_focal(bins=4), 0.5, 1.0, 2.0, 3.0)
    for p, gamma in ((0.2, 0.5), (0.25, 1.0), (0.49, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 3.0)):
        logits = torch.tensor([[0.0, math.log(1 / p - 1)]])
        expected = (1 - p) ** gamma * -math.log(p)
        got = loss(logits, torch.tensor([0]))
        torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", [0, 1])
def test_ada_focal_equals_its_formula(seed: int):
    gammas = [3.0, -0.2, 0.2, 20.0, -2.0]
    loss = set_gammas(ada_focal(5, bins=5), *gammas)

    def formula(z: np.ndarray, y: int, detached: np.ndarray) -> float:
        p, gamma = softmax(z)[y], gammas[min(4, int(5 * softmax(detached)[y]))]
        base = 1 - p if gamma > 0 else 1 + p
        return base ** abs(gamma) * -math.log(p)

    logits, targets = batch(samples=20, scale=2.0, seed=seed)
    assert_agrees(loss, formula, logits, targets)


def test_an_epoch_of_ada_focal_by_hand():
    # Two bins of two: edges at 0.6 (the lowest, in no bin), 0.8 and 0.9. (0.6, 0.8] holds 0.7
    # and 0.8, one of them right; (0.8, 0.9] holds 0.9, right.
    loss = set_gammas(ada_focal(bins=2, rate=2.0), 1.0, -1.5)
    loss.end_epoch(Validation([0.9, 0.7, 0.8, 0.6], [1, 0, 1, 1]))
    torch.testing.assert_close(loss.edges, torch.tensor([0.8]).double(), atol=1e-7, rtol=0)
    # Overconfident by 0.75 - 0.5: more focal. Underconfident by 0.1 at g < 0: more inverse.
    expected = torch.tensor([math.exp(2 * 0.25), -1.5 * math.exp(2 * 0.1)]).double()
    torch.testing.assert_close(loss.gammas, expected, rtol=1e-6, atol=0)
    # The bins are those of the validation images from now on.
    logits, targets = of(0.79)
    gamma = expected[0].item()
    torch.testing.assert_close(
        loss(logits, targets), torch.tensor(0.21**gamma * -math.log(0.79)), rtol=1e-4, atol=0
    )


def test_edges_between_samples_are_interpolated():
    # Five in two bins: the border lies at position 2.5 of the sorted confidences.
    loss = ada_focal(bins=2)
    loss.end_epoch(Validation([0.9, 0.5, 0.7, 0.6, 0.8], [1, 1, 1, 1, 1]))
    torch.testing.assert_close(loss.edges, torch.tensor([0.75]).double(), atol=1e-7, rtol=0)
    confidence = torch.tensor([(0.6 + 0.7) / 2, (0.8 + 0.9) / 2]).double()  # without 0.5
    torch.testing.assert_close(loss.gammas, (confidence - 1).exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("gamma", "right", "expected"),
    [
        (0.25, 1, -0.2),  # 0.25 exp(-0.3) = 0.185: below the switch, so inverse
        (-0.25, 0, 0.2),  # -0.25 exp(-0.7) = -0.124
        (19.0, 0, 20.0),  # 19 exp(0.7) is above the maximum
        (-1.9, 1, -2.0),  # -1.9 exp(0.3) is below the minimum
    ],
)
def test_switch_and_limits(gamma: float, right: int, expected: float):
    loss = set_gammas(ada_focal(bins=1), gamma)
    loss.end_epoch(Validation([0.6, 0.7, 0.7], [right] * 3))  # the bin is (0.6, 0.7]
    torch.testing.assert_close(loss.gammas, torch.tensor([expected]).double())


def test_equal_confidences_leave_bins_empty_and_their_gammas():
    loss = ada_focal(bins=3)
    loss.end_epoch(Validation([0.7] + [0.9] * 8, [1] * 9))  # edges 0.7, 0.9, 0.9, 0.9
    expected = torch.tensor([math.exp(-0.1), 1.0, 1.0]).double()
    torch.testing.assert_close(loss.gammas, expected, rtol=1e-6, atol=0)
    set_gammas(loss, 1.0, 2.0, 3.0)
    for p, gamma in ((0.85, 1.0), (0.95, 3.0)):  # none falls into the empty bin in the middle
        expected = torch.tensor((1 - p) ** gamma * -math.log(p))
        torch.testing.assert_close(loss(*of(p)), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("gamma", [0.2, -0.2, 20.0])
def test_certain_samples_have_a_finite_gradient(gamma: float):
    loss = set_gammas(ada_focal(bins=1), gamma)
    logits = torch.tensor([[300.0, 0.0], [-300.0, 0.0], [17.0, 0.0]], requires_grad=True)
    value = loss(logits, torch.zeros(3, dtype=torch.long))
    assert value.isfinite()
    assert torch.autograd.grad(value, logits)[0].isfinite().all()


def test_diagnostics_are_the_range_of_gammas():
    loss = set_gammas(ada_focal(bins=3), 1.0, -0.5, 2.0)
    assert loss.pop_diagnostics() == {"gamma_least": -0.5, "gamma_greatest": 2.0}


def test_no_validation_images_are_named():
    with pytest.raises(ValueError, match=r"validation has 0 images: AdaFocal derives its gammas"):
        ada_focal().end_epoch(Validation([], []))
