"""Brier score as a loss against hand-computed cases, its formula and scikit-learn."""

import torch
from sklearn.metrics import brier_score_loss

from calib.losses import build_loss
from tests.calib.losses.formulas import assert_agrees, batch, softmax


def test_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    got = build_loss("brier", 3)(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(got, torch.tensor((0.25 + 0.09 + 0.04 + 0.01 + 0.81 + 0.64) / 2))


def test_equals_scikit_learn():
    logits, targets = batch(samples=30)
    probabilities = logits.double().softmax(1).numpy()
    peer = brier_score_loss(targets.numpy(), probabilities, labels=range(5), scale_by_half=False)
    got = build_loss("brier", 5)(logits, targets)
    torch.testing.assert_close(got.double(), torch.tensor(peer).double(), rtol=1e-5, atol=0)


def test_equals_its_formula():
    def formula(z, y, held):
        return sum((p - (k == y)) ** 2 for k, p in enumerate(softmax(z)))

    assert_agrees(build_loss("brier", 5), formula, *batch())
