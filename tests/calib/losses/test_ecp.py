"""ECP against hand-computed cases, its formula and scipy's entropy."""

import math

import pytest
import torch
from scipy.stats import entropy

from calib.losses import build_loss
from tests.calib.losses.formulas import assert_agrees, batch, softmax


@pytest.mark.parametrize(("variant", "share"), [("paper", 1), ("code", 1 / 4)])
def test_by_hand(variant: str, share: float):
    got = build_loss("ecp", 4, weight=0.3, variant=variant)(torch.zeros(1, 4), torch.tensor([1]))
    torch.testing.assert_close(got, torch.tensor((1 - 0.3 * share) * math.log(4)))


def test_averages_over_classes_unless_told():
    logits, targets = batch()
    plain = build_loss("ce", 5)(logits, targets)
    peer = torch.tensor(entropy(logits.softmax(1).numpy(), axis=1)).mean()
    torch.testing.assert_close(build_loss("ecp", 5)(logits, targets), plain - 0.1 * peer / 5)


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_equals_its_formula(variant: str):
    def formula(z, y, held):
        p = softmax(z)
        terms = [-p_k * math.log(p_k) for p_k in p]
        amount = sum(terms) if variant == "paper" else sum(terms) / len(terms)
        return -math.log(p[y]) - 0.4 * amount

    loss = build_loss("ecp", 5, weight=0.4, variant=variant)
    assert_agrees(loss, formula, *batch())
