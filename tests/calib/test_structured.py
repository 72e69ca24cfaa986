"""Structured and ensemble scaling: against probmetrics, on known truth, with few images."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.structured import fit_ensemble, fit_sms, fit_svs
from tests.calib.metrics.oracle import CASES, FILE, case


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["svs", "sms", "ets"])
def test_it_calibrates_as_well_as_probmetrics_own(name: str, kind: str):
    """The tolerance is 1e-4, as probmetrics works in float32 and stops earlier."""
    logits, targets = (torch.from_numpy(array) for array in case(*CASES[name]))
    half = len(logits) // 2
    fit = {"svs": fit_svs, "sms": fit_sms, "ets": fit_ensemble}[kind]
    scaled = fit(logits[:half], targets[:half]).apply(logits[half:])
    nll = json.loads(FILE.read_text())["calibrated"][name][kind]
    assert functional.cross_entropy(scaled, targets[half:]).item() == pytest.approx(nll, abs=1e-4)


def known_truth(samples: int, classes: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets drawn from softmax(W z + b), and its logits."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, classes, generator=rng, dtype=torch.float64)
    noise = torch.randn(classes, classes, generator=rng, dtype=torch.float64)
    # Rows of equal sum: a shift of all logits, which leaves softmax as it is, then changes nothing.
    noise = noise - noise.mean(1, keepdim=True)
    truth = logits @ (0.6 * torch.eye(classes) + 0.15 * noise).T + noise[0]
    targets = torch.multinomial(truth.softmax(1), 1, generator=rng)[:, 0]
    return logits, targets, truth


def test_with_many_images_sms_finds_a_whole_matrix_and_the_others_do_not():
    logits, targets, truth = known_truth(20_000, 4, seed=1)
    best = functional.cross_entropy(truth, targets).item()
    nll = {
        name: functional.cross_entropy(fit(logits, targets).apply(logits), targets).item()
        for name, fit in (("sms", fit_sms), ("svs", fit_svs), ("ets", fit_ensemble))
    }
    assert best - 0.002 < nll["sms"] < best + 0.002
    assert nll["sms"] < nll["svs"] - 0.01 < nll["ets"] - 0.01
    fitted = fit_sms(logits, targets)
    assert fitted.weight.shape == (4, 4) and fit_svs(logits, targets).weight.shape == (4,)


def test_with_few_images_sms_stays_near_temperature_scaling(caplog):
    logits, targets, _ = known_truth(12, 6, seed=2)
    fitted = fit_sms(logits, targets)
    outside = fitted.weight - fitted.weight.diagonal().diag()
    assert outside.abs().max() < 0.1
    few = fit_sms(logits[:5], targets[:5])
    assert few.weight.shape == (6,)
    assert "5 validation images are too few for the matrix of 6 classes: SVS" in caplog.text


def test_images_that_are_all_right_leave_nothing_certain():
    """Temperature scaling alone would end at its bound."""
    logits, targets = torch.eye(3).repeat(20, 1) * 5, torch.arange(3).repeat(20)
    for fit in (fit_svs, fit_sms):
        scaled = fit(logits, targets).apply(torch.tensor([[5.0, 0, 0], [0, 0, 5.0]]))
        assert 0.98 < scaled.softmax(1).max() < 0.999
        assert scaled.isfinite().all()


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_no_other_weights_of_an_ensemble_are_likelier(noise: float):
    """Against every weighting on a grid of steps of 0.02, corners and edges included."""
    logits, targets, _ = known_truth(400, 3, seed=4)
    rng = torch.Generator().manual_seed(5)
    random = torch.randint(3, targets.shape, generator=rng)
    targets = torch.where(torch.rand(targets.shape, generator=rng) < noise, random, targets)
    fitted = fit_ensemble(4 * logits, targets)
    best = functional.cross_entropy(fitted.apply(4 * logits), targets).item()
    for first in range(51):
        for second in range(51 - first):
            weights = (first / 50, second / 50, (50 - first - second) / 50)
            other = replace(fitted, weights=weights).apply(4 * logits)
            assert best <= functional.cross_entropy(other, targets).item() + 1e-12


def test_an_ensemble_weighs_chance_where_labels_are_noise():
    _, targets, _ = known_truth(2000, 3, seed=3)
    noisy = torch.where(torch.arange(2000) % 2 == 0, targets, torch.arange(2000) % 3)
    confident = 20 * functional.one_hot(targets, 3).double()
    ensemble = fit_ensemble(confident, noisy)
    assert sum(ensemble.weights) == pytest.approx(1) and min(ensemble.weights) >= 0
    scaled = ensemble.apply(confident).exp()
    torch.testing.assert_close(scaled.sum(1), torch.ones(2000, dtype=torch.float64))
    assert scaled.max(1).values.mean() == pytest.approx(2 / 3, abs=0.02)


def test_logits_of_other_classes_are_refused_by_structured_scaling():
    logits, targets, _ = known_truth(50, 3, seed=4)
    with pytest.raises(ValueError, match=r"logits have shape \(2, 4\): fitted on \[N, 3\]"):
        fit_svs(logits, targets).apply(torch.zeros(2, 4))
