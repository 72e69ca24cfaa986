"""Isotonic regression: equal to scipy's, normalised, and finite where it says zero."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torch.nn import functional

from calib.metrics import calibration_metrics
from calib.posthoc import Isotonic, fit_isotonic


def noisy_case(seed: int = 0, samples: int = 300, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Logits that are far too sure of themselves."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (samples,), generator=rng)
    clean = 2 * functional.one_hot(targets, classes)
    return 3 * (clean + 1.5 * torch.randn(samples, classes, generator=rng)), targets


def test_two_classes_by_hand():
    # Class 0 at p = 0.2, 0.4, 0.6, 0.8 is 0, 1, 0, 1: the middle two are pooled to 1/2.
    p = torch.tensor([0.2, 0.4, 0.6, 0.8]).double()
    logits = torch.stack([p, 1 - p], dim=1).log()
    fitted = fit_isotonic(logits, torch.tensor([1, 0, 1, 0]))
    got = fitted.apply(logits).exp()
    low = (1 / 8) / (1 + 1 / 8)  # 0 is raised to 1 / (4 * 2), beside 1
    wanted = torch.tensor([low, 0.5, 0.5, 1 - low]).double()
    torch.testing.assert_close(got, torch.stack([wanted, 1 - wanted], dim=1))
    # Between knots it is a line: 0 .. 1/2 from 0.2 to 0.4, and level outside.
    p = torch.tensor([0.01, 0.3, 0.99]).double()
    got = fitted.apply(torch.stack([p, 1 - p], dim=1).log()).exp()
    torch.testing.assert_close(got[:, 0], torch.tensor([low, 0.25, 1 - low]).double())


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_scipy_at_the_fitted_points(seed: int):
    logits, targets = noisy_case(seed)
    p = logits.double().softmax(1).numpy()
    columns = []
    for k in range(4):
        order = np.argsort(p[:, k], kind="stable")
        column = np.empty(len(p))
        column[order] = isotonic_regression((targets.numpy() == k)[order].astype(float)).x
        columns.append(np.maximum(column, 1 / (300 * 4)))
    wanted = np.stack(columns, axis=1)
    wanted /= wanted.sum(1, keepdims=True)
    got = fit_isotonic(logits, targets).apply(logits)
    torch.testing.assert_close(got.exp(), torch.from_numpy(wanted), rtol=1e-9, atol=0)


def test_calibrates_other_data():
    fitted = fit_isotonic(*noisy_case(2, samples=2000))
    logits, targets = noisy_case(3, samples=2000)
    before, after = (calibration_metrics(z, targets) for z in (logits, fitted.apply(logits)))
    assert after.ece < before.ece / 3
    assert after.nll < before.nll
    assert after.accuracy > before.accuracy - 0.02


def test_rows_sum_to_one_and_zeros_are_finite():
    # Class 2 has no image, so that its map is 0 throughout and raised to 1 / (N K).
    logits, targets = noisy_case(4)
    seen = targets != 2
    fitted = fit_isotonic(logits[seen], targets[seen])
    got = fitted.apply(logits)
    torch.testing.assert_close(got.exp().sum(1), torch.ones(300).double())
    assert fitted.floor == 1 / (seen.sum() * 4)
    assert got.isfinite().all()
    assert (got[:, 2] == got.min(1).values).all()


def test_a_row_of_zeros_becomes_uniform():
    step = (np.array([0.5, 0.9]), np.array([0.0, 1.0]))
    got = Isotonic((step, step, step), floor=1e-4).apply(torch.tensor([[0.0, 0.1, 0.2]]))
    torch.testing.assert_close(got, torch.full((1, 3), -math.log(3)).double())


def test_survives_json():
    logits, targets = noisy_case(5)
    fitted = fit_isotonic(logits, targets)
    again = Isotonic.from_dict(json.loads(json.dumps(fitted.as_dict())))
    torch.testing.assert_close(again.apply(logits), fitted.apply(logits), rtol=0, atol=0)


def test_bad_input_is_named():
    logits, targets = noisy_case(6, samples=20)
    with pytest.raises(ValueError, match=r"logits have shape \(4,\): fitted on \[N, 4\]"):
        fit_isotonic(logits, targets).apply(logits[0])
    with pytest.raises(ValueError, match=r"logits have 0 rows"):
        fit_isotonic(logits[:0], targets[:0])
