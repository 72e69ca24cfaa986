"""Scores of out-of-distribution images: by hand and against torchmetrics."""

import math

import pytest
import torch
from torchmetrics.classification import BinaryAUROC

from semix.calib.metrics import (
    max_probability,
    negative_entropy,
    ood_metrics,
)
from tests.calib.metrics.test_measures import logits_of


def test_separable_scores():
    got = ood_metrics(torch.linspace(0.6, 1, 40), torch.linspace(0, 0.5, 30))
    assert got.as_dict() == {"auroc": 1.0, "fpr95": 0.0}


def test_ood_by_hand():
    # Of 100 known scores 1..100, 95 are at least 6; of the OOD ones 6 and 50 pass.
    got = ood_metrics(torch.arange(1.0, 101.0), torch.tensor([5.5, 6.0, 50.0]))
    assert got.fpr95 == pytest.approx(2 / 3)
    # Known above 5.5: 95; above 6: 94 and a tie; above 50: 50 and a tie.
    assert got.auroc == pytest.approx((95 + 94.5 + 50.5) / 300)


def test_auroc_equals_torchmetrics():
    rng = torch.Generator().manual_seed(0)
    known = torch.randint(0, 40, (300,), generator=rng) / 40
    ood = torch.randint(-10, 30, (200,), generator=rng) / 40
    labels = torch.cat([torch.ones(300), torch.zeros(200)]).long()
    scores = torch.cat([known, ood])
    peer = BinaryAUROC()((scores - scores.min()) / 2, labels).item()
    assert ood_metrics(known, ood).auroc == pytest.approx(peer, abs=1e-6)


def test_scores_of_logits():
    logits = logits_of([[0.5, 0.5], [0.9, 0.1]]).float()
    torch.testing.assert_close(max_probability(logits), torch.tensor([0.5, 0.9]).double())
    entropy = 0.9 * math.log(0.9) + 0.1 * math.log(0.1)
    expected = torch.tensor([-math.log(2), entropy], dtype=torch.float64)
    torch.testing.assert_close(negative_entropy(logits), expected, atol=1e-6, rtol=0)


def test_bad_scores_are_named():
    with pytest.raises(ValueError, match=r"out_scores have shape \(0,\)"):
        ood_metrics(torch.ones(3), torch.ones(0))
    with pytest.raises(ValueError, match=r"in_scores\[1\] = nan: every score must be finite"):
        ood_metrics(torch.tensor([0.0, math.nan]), torch.ones(2))
