"""Temperature scaling: by hand, against scipy, and at its bounds."""

import logging
import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn import functional

from semix.calib.metrics import calibration_metrics
from semix.calib.temperature import MAX_TEMPERATURE, MIN_TEMPERATURE, fit_temperature
from semix.data.errors import InputError


def noisy_five(seed: int, scale: float = 1.0, samples: int = 400) -> tuple[Tensor, Tensor]:
    """Logits that are right more often than chance."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(5, (samples,), generator=rng)
    clean = 2 * functional.one_hot(targets, 5)
    return scale * (clean + 1.5 * torch.randn(samples, 5, generator=rng)), targets


def nll(logits: Tensor, targets: Tensor, temperature: float) -> float:
    return functional.cross_entropy(logits.double() / temperature, targets).item()


def test_temperature_of_two_classes_by_hand():
    # Margin 3 throughout and 3 of 4 right: NLL is lowest where sigmoid(3 / T) = 3/4.
    logits = torch.tensor([[3.0, 0.0]] * 4)
    got = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))
    assert got == pytest.approx(3 / math.log(3), rel=1e-9)


def test_the_temperature_that_the_targets_were_drawn_at_is_found():
    # Targets in exact proportion to softmax(logits / 2.5), so that the minimum is exact.
    logits = torch.tensor([[1.0, 0.0, -2.0], [0.5, 3.0, 0.0]], dtype=torch.float64)
    counts = ((logits / 2.5).softmax(1) * 200_000).round().long()
    rows = torch.cat([logits[n].expand(3, 3).repeat_interleave(counts[n], 0) for n in range(2)])
    targets = torch.cat([torch.arange(3).repeat_interleave(counts[n]) for n in range(2)])
    assert fit_temperature(rows, targets) == pytest.approx(2.5, abs=1e-3)


@pytest.mark.parametrize("scale", [0.05, 1.0, 40.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_temperature_equals_a_bounded_search(scale: float, seed: int):
    logits, targets = noisy_five(seed, scale)
    search = minimize_scalar(
        lambda inverse: nll(logits, targets, 1 / inverse),
        bounds=(1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE),
        method="bounded",
        options={"xatol": 1e-10},
    )
    got = fit_temperature(logits, targets)
    assert got == pytest.approx(1 / search.x, rel=1e-4)
    assert nll(logits, targets, got) <= search.fun + 1e-12


def test_scaling_the_logits_scales_the_temperature():
    logits, targets = noisy_five(2)
    assert fit_temperature(7 * logits.double(), targets) == pytest.approx(
        7 * fit_temperature(logits.double(), targets), rel=1e-7
    )


def test_a_shift_of_each_row_changes_nothing():
    logits, targets = noisy_five(3)
    shifted = logits.double() + 1e6 * torch.arange(len(logits))[:, None]
    assert fit_temperature(shifted, targets) == pytest.approx(
        fit_temperature(logits, targets), rel=1e-6
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_temperature_of_separable_data_is_the_lower_bound(
    scale: float, caplog: pytest.LogCaptureFixture
):
    targets = torch.arange(6) % 3
    logits = scale * functional.one_hot(targets, 3).float()
    with caplog.at_level(logging.WARNING):
        assert fit_temperature(logits, targets) == MIN_TEMPERATURE
    assert "no minimum for T in [0.01, 100]: T = 0.01" in caplog.text


def test_logits_against_the_targets_end_at_the_upper_bound():
    targets = torch.arange(6) % 3
    assert fit_temperature(-5 * functional.one_hot(targets, 3).float(), targets) == MAX_TEMPERATURE


def test_constant_logits_leave_one():
    assert fit_temperature(torch.full((4, 3), 2.0), torch.tensor([0, 1, 2, 0])) == 1


def test_does_not_touch_the_logits():
    logits, targets = noisy_five(4)
    logits.requires_grad_()
    before = logits.detach().clone()
    fit_temperature(logits, targets)
    assert logits.grad is None
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


def test_logits_that_are_no_numbers_are_named():
    with pytest.raises(ValueError, match=r"logits\[0, 1\] = nan: every logit must be finite"):
        fit_temperature(torch.tensor([[0.0, math.nan]]), torch.tensor([0]))


def test_other_criterion_is_named():
    with pytest.raises(InputError, match=r"criterion = brier: choose one of nll, ece"):
        fit_temperature(*noisy_five(0), criterion="brier")


@pytest.mark.parametrize("seed", [0, 1])
def test_by_ece_it_is_the_first_best_of_the_grid(seed: int):
    logits, targets = noisy_five(seed, 2.0)
    errors = [calibration_metrics(logits.double() / (k / 10), targets).ece for k in range(1, 101)]
    expected = (errors.index(min(errors)) + 1) / 10
    assert fit_temperature(logits, targets, criterion="ece") == expected
    assert expected != pytest.approx(fit_temperature(logits, targets), abs=1e-3)


def test_by_ece_a_tie_takes_the_least():
    # Right with the largest of two equal logits: confidence 1/2 and ECE 1/2 whatever T.
    assert fit_temperature(torch.zeros(3, 2), torch.tensor([0, 0, 0]), criterion="ece") == 0.1
