"""CPC against hand-computed cases and its formula."""

import math

import numpy as np
import pytest
import torch

from calib.losses import build_loss
from data.errors import InputError
from tests.calib.losses.formulas import assert_agrees, batch, softmax


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_by_hand(variant: str):
    # True class 1 with logit 2; the others 0 and 1. K = 3, so one unordered pair of others.
    loss = build_loss("cpc", 3, binary_weight=0.5, exclusion_weight=4.0, variant=variant)
    got = loss(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([1]))
    cross_entropy = math.log(1 + math.exp(2) + math.exp(1)) - 2
    binary = (softplus(-2) + softplus(-1)) / 2
    exclusion = (softplus(1) + softplus(-1)) / 2 / 2
    if variant == "code":
        exclusion += math.log(2) / 2
    torch.testing.assert_close(got, torch.tensor(cross_entropy + 0.5 * binary + 4 * exclusion))


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("classes", [3, 6])
def test_agrees_with_its_formula(classes: int, variant: str):
    def formula(z: np.ndarray, y: int, held: np.ndarray) -> float:
        others = [k for k in range(classes) if k != y]
        total = -math.log(softmax(z)[y])
        total += 0.1 * sum(softplus(z[k] - z[y]) for k in others) / (classes - 1)
        for j in others:
            for k in others:
                if j != k or variant == "code":
                    total += softplus(z[k] - z[j]) / 2 / (classes - 1) / (classes - 2)
        return total

    logits, targets = batch(classes=classes)
    assert_agrees(build_loss("cpc", classes, variant=variant), formula, logits, targets)


def test_two_classes_have_no_others_to_compare():
    got = build_loss("cpc", 2)(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    torch.testing.assert_close(got, torch.tensor(1.1 * softplus(-1)))


def test_bad_settings_are_named():
    with pytest.raises(InputError, match=r"loss\.binary_weight = -1: must be 0 or more"):
        build_loss("cpc", 3, binary_weight=-1)
    with pytest.raises(InputError, match=r"loss\.exclusion_weight = -1: must be 0 or more"):
        build_loss("cpc", 3, exclusion_weight=-1)
    with pytest.raises(InputError, match=r"loss\.variant = x: choose one of code, paper"):
        build_loss("cpc", 3, variant="x")
