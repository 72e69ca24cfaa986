"""Brier score in parts and the risk-coverage curve, by hand and against plain loops."""

import numpy as np
import pytest
import torch

from calib.metrics import calibration_metrics
from calib.metrics.measures import risk_coverage_area


def test_brier_parts_by_hand():
    # Both classes: two samples at 0.9 and 0.1 for class 0, of which one is right each.
    logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.1, 0.9]]).double().log()
    got = calibration_metrics(logits, torch.tensor([0, 1, 1, 1]), bins=2)
    # Class 0: bin of 0.9 has frequency 1/2, bin of 0.1 has 0; overall 1/4. Class 1 mirrors it.
    assert got.brier_reliability == pytest.approx(2 * (0.4**2 + 0.1**2) / 2)
    assert got.brier_resolution == pytest.approx(2 * 0.25**2)
    assert got.brier_uncertainty == pytest.approx(2 * 0.25 * 0.75)
    assert got.brier_within == pytest.approx(0, abs=1e-12)
    assert got.brier == pytest.approx(2 * (3 * 0.1**2 + 0.9**2) / 4)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_brier_parts_equal_the_loop(bins: int):
    rng = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(400, 5, generator=rng, dtype=torch.float64)
    targets = torch.randint(5, (400,), generator=rng)
    p, y = logits.softmax(1).numpy(), np.eye(5)[targets]
    place = np.ceil(p * bins).astype(int)
    reliability = resolution = within = 0.0
    for k in range(5):
        for b in range(1, bins + 1):
            inside = place[:, k] == b
            if inside.any():
                q, o = p[inside, k], y[inside, k]
                share = inside.mean()
                reliability += share * (q.mean() - o.mean()) ** 2
                resolution += share * (o.mean() - y[:, k].mean()) ** 2
                within += share * (q.var() - 2 * ((q - q.mean()) * (o - o.mean())).mean())
    got = calibration_metrics(logits, targets, bins)
    assert got.brier_reliability == pytest.approx(reliability)
    assert got.brier_resolution == pytest.approx(resolution)
    assert got.brier_uncertainty == pytest.approx(y.var(0).sum())
    assert got.brier_within == pytest.approx(within)
    assert got.brier == pytest.approx(((p - y) ** 2).sum(1).mean())


def test_aurc_by_hand():
    # From the surest on: right, wrong, right, wrong. Risks 0, 1/2, 1/3, 2/4.
    confidence = torch.tensor([0.9, 0.8, 0.7, 0.6], dtype=torch.float64)
    correct = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    for order in (torch.arange(4), torch.tensor([2, 0, 3, 1])):
        got = risk_coverage_area(confidence[order], correct[order])
        assert got == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)


def test_aurc_of_equal_confidences_is_the_error_rate():
    correct = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    assert risk_coverage_area(torch.full((5,), 0.5).double(), correct) == pytest.approx(0.4)
