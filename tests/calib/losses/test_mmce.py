"""MMCE and its weighted form against hand-computed cases and their formulas."""

import math

import numpy as np
import pytest
import torch

from calib.losses import build_loss
from data.errors import InputError
from tests.calib.losses.formulas import batch
from tests.calib.losses.whole_batch import assert_agrees, confidences, cross_entropy

# Confidence 0.8 and right, confidence 0.6 and wrong.
LOGITS = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).log()
TARGETS = torch.tensor([0, 0])
CE = -(math.log(0.8) + math.log(0.4)) / 2


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_mmce_by_hand(variant: str):
    # Gaps 0.2 and -0.6; the kernel of 0.8 and 0.6 is exp(-0.2 / 0.5).
    error = (0.2**2 + 0.6**2 - 2 * 0.2 * 0.6 * math.exp(-0.4)) / 4
    if variant == "paper":
        error = math.sqrt(error)
    loss = build_loss("mmce", 2, weight=3.0, bandwidth=0.5, variant=variant)
    torch.testing.assert_close(loss(LOGITS, TARGETS), torch.tensor(CE + 3 * error))


def test_weighted_by_hand():
    # One right, one wrong: means are sums, and the second division is by 1 + 1e-5.
    error = (0.2**2 + 0.6**2 - 2 * 0.2 * 0.6 * math.exp(-0.4)) / (1 + 1e-5)
    loss = build_loss("mmce_weighted", 2, weight=3.0, bandwidth=0.5)
    got = loss(LOGITS, TARGETS)
    torch.testing.assert_close(got, torch.tensor(CE + 3 * math.sqrt(error + 1e-10)))


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mmce_agrees_with_its_formula(seed: int, variant: str):
    logits, targets = batch(samples=7, classes=4, seed=seed)

    def formula(z: np.ndarray) -> float:
        total = 0.0
        for c, a in confidences(z, targets):
            for d, b in confidences(z, targets):
                total += (a - c) * (b - d) * math.exp(-abs(c - d) / 0.4)
        error = total / 49 if variant == "code" else math.sqrt(total / 49 + 1e-10)
        return cross_entropy(z, targets) + error

    assert_agrees(build_loss("mmce", 4, variant=variant), formula, logits, targets)


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_weighted_agrees_with_its_formula(seed: int, variant: str):
    logits, targets = batch(samples=7, classes=4, seed=seed)

    def of_pairs(left: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
        total = sum(v * w * math.exp(-abs(c - d) / 0.4) for c, v in left for d, w in other)
        pairs = len(left) * len(other)
        return total / pairs if variant == "paper" else total / pairs / (pairs + 1e-5)

    def formula(z: np.ndarray) -> float:
        found = confidences(z, targets)
        right = [(c, 1 - c) for c, a in found if a]
        wrong = [(c, c) for c, a in found if not a]
        assert right
        assert wrong
        error = of_pairs(right, right) + of_pairs(wrong, wrong) - 2 * of_pairs(right, wrong)
        return cross_entropy(z, targets) + 2 * math.sqrt(error + 1e-10)

    assert_agrees(build_loss("mmce_weighted", 4, variant=variant), formula, logits, targets)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("variant", ["code", "paper"])
def test_weighted_is_cross_entropy_where_all_are_right_or_all_wrong(right: bool, variant: str):
    logits, _ = batch(samples=6)
    targets = logits.argmax(1) if right else logits.argmin(1)
    slopes = []
    for loss in (build_loss("mmce_weighted", 5, variant=variant), build_loss("ce", 5)):
        own = logits.clone().requires_grad_()
        slopes.append(torch.autograd.grad(loss(own, targets), own)[0])
    torch.testing.assert_close(slopes[0], slopes[1], rtol=0, atol=0)


def test_certain_and_right_samples_have_a_finite_gradient():
    logits = (200 * torch.eye(3)).requires_grad_()
    for name in ("mmce", "mmce_weighted"):
        loss = build_loss(name, 3, variant="paper")(logits, torch.tensor([0, 1, 1]))
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()
        loss = build_loss(name, 3, variant="paper")(logits, torch.tensor([0, 1, 2]))
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_the_root_is_of_a_little_more():
    logits, targets = 200 * torch.eye(3), torch.tensor([0, 1, 2])  # certain and right: M = 0
    got = build_loss("mmce", 3, weight=1e5, variant="paper")(logits, targets)
    torch.testing.assert_close(got, torch.tensor(1.0))


def test_one_sample():
    # MMCE of one is its squared gap; weighted MMCE has nothing to compare.
    got = build_loss("mmce", 2)(LOGITS[:1], TARGETS[:1])
    torch.testing.assert_close(got, torch.tensor(-math.log(0.8) + 0.2**2))
    with pytest.raises(ValueError, match=r"logits have 1 row: weighted MMCE compares .* give 2"):
        build_loss("mmce_weighted", 2)(LOGITS[:1], TARGETS[:1])


@pytest.mark.parametrize("name", ["mmce", "mmce_weighted"])
def test_bad_settings_are_named(name: str):
    with pytest.raises(InputError, match=r"loss\.weight = -1: must be 0 or more"):
        build_loss(name, 3, weight=-1)
    with pytest.raises(InputError, match=r"loss\.bandwidth = 0: must be above 0"):
        build_loss(name, 3, bandwidth=0)
    with pytest.raises(InputError, match=r"loss\.variant = x: choose one of code, paper"):
        build_loss(name, 3, variant="x")
