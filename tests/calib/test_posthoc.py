"""Temperature, vector and isotonic scaling: by hand, against scipy, and finite everywhere."""

import logging
import math

import numpy as np
import pytest
import torch
from scipy.optimize import isotonic_regression, minimize, minimize_scalar
from torch import Tensor
from torch.nn import functional

from semix.calib.metrics import calibration_metrics
from semix.calib.posthoc import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Isotonic,
    VectorScaling,
    fit_isotonic,
    fit_temperature,
    fit_vector,
)
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


def skewed_case(seed: int = 0, samples: int = 400, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Float64 logits, right more often than not; each class has its own scale and offset."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (samples,), generator=rng)
    clean = 3 * functional.one_hot(targets, classes)
    noise = 1.5 * torch.randn(samples, classes, generator=rng).double()
    offset = torch.arange(classes) / classes
    return (clean + noise) * (1 + offset) + 2 * offset, targets


def nll_and_slope(x: np.ndarray, logits: Tensor, targets: Tensor) -> tuple[float, np.ndarray]:
    """NLL of softmax(w z + b) for x = (w, b), and its derivative, written out."""
    z, n = logits.numpy(), len(logits)
    w, b = x.reshape(2, -1)
    scores = z * w + b
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    residual = p.copy()
    residual[np.arange(n), targets] -= 1
    nll = -np.log(p[np.arange(n), targets]).mean()
    return nll, np.concatenate([(residual * z).mean(0), residual.mean(0)])


def test_one_constant_logit_leaves_the_class_frequencies():
    # Whatever w, each row is b up to a shift; 2, 1 and 1 of four images: p = 1/2, 1/4, 1/4.
    fitted = fit_vector(torch.full((4, 3), 2.0), torch.tensor([0, 0, 1, 2]))
    p = fitted.apply(torch.full((1, 3), 2.0)).softmax(1)
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.25, 0.25]]).double(), atol=1e-7, rtol=0)


def test_vector_scaling_of_two_classes_by_hand():
    # Logit 0 is 0 or 3, logit 1 always 0: logistic regression with log odds b and 3 w + b,
    # from 1 of 4 and 3 of 4 images of class 0.
    logits = torch.tensor([[0.0, 0.0]] * 4 + [[3.0, 0.0]] * 4)
    fitted = fit_vector(logits, torch.tensor([0, 1, 1, 1, 0, 0, 0, 1]))
    assert fitted.weight[0].item() == pytest.approx(2 * math.log(3) / 3, rel=1e-6)
    assert (fitted.bias[0] - fitted.bias[1]).item() == pytest.approx(-math.log(3), rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_vector_scaling_equals_scipy(seed: int):
    logits, targets = skewed_case(seed)
    start = np.repeat([1.0, 0.0], 5)
    oracle = minimize(
        nll_and_slope, start, (logits, targets), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    fitted = fit_vector(logits, targets)
    torch.testing.assert_close(fitted.weight, torch.from_numpy(oracle.x[:5]), atol=1e-5, rtol=0)
    bias = torch.from_numpy(oracle.x[5:])
    torch.testing.assert_close(fitted.bias, bias - bias.mean(), atol=1e-5, rtol=0)
    got, slope = nll_and_slope(
        np.concatenate([fitted.weight.numpy(), fitted.bias.numpy()]), logits, targets
    )
    assert got == pytest.approx(oracle.fun, abs=1e-12)
    assert np.abs(slope).max() < 1e-6
    temperature = fit_temperature(logits, targets)
    assert got < functional.cross_entropy(logits / temperature, targets).item() - 0.05


def test_vector_scaling_recovers_what_the_logits_were_scaled_by():
    # Targets in exact proportion to softmax(z), so that w z' + b = z is the minimum.
    z = torch.tensor(
        [[1.0, 0.0, -1.0], [0.5, 2.0, 0.0], [0.0, 0.3, 1.2], [-1.0, 0.7, 0.2]]
    ).double()
    counts = (z.softmax(1) * 100_000).round().long()
    rows = torch.arange(4).repeat_interleave(counts.sum(1))
    targets = torch.cat([torch.arange(3).repeat_interleave(count) for count in counts])
    w, b = torch.tensor([0.5, 2.0, 3.0]).double(), torch.tensor([1.0, -3.0, 2.0]).double()
    fitted = fit_vector(((z - b) / w)[rows], targets)
    torch.testing.assert_close(fitted.weight, w, rtol=1e-3, atol=0)
    torch.testing.assert_close(fitted.bias, b, rtol=0, atol=1e-2)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_the_scale_of_the_logits_does_not_matter(scale: float):
    logits, targets = skewed_case(2)
    torch.testing.assert_close(
        fit_vector(scale * logits, targets).apply(scale * logits),
        fit_vector(logits, targets).apply(logits),
        rtol=1e-5,
        atol=1e-5,
    )


def test_an_absent_class_gets_a_low_finite_probability(caplog: pytest.LogCaptureFixture):
    logits, targets = skewed_case(3, samples=100)
    present = targets != 3
    with caplog.at_level(logging.WARNING):
        fitted = fit_vector(logits[present], targets[present])
    assert "do not determine the vector scaling of class 3: near temperature" in caplog.text
    p = fitted.apply(logits).softmax(1)
    assert p[:, 3].min() > 0
    assert p[present, 3].max() < 1e-3
    assert fitted.weight.abs().max() < 10


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_vector_scaling_of_separable_data_is_finite_and_right(
    scale: float, caplog: pytest.LogCaptureFixture
):
    targets = torch.arange(30) % 3
    noise = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    logits = scale * (functional.one_hot(targets, 3) + 0.1 * noise)
    with caplog.at_level(logging.WARNING):
        scaled = fit_vector(logits, targets).apply(logits)
    assert "do not determine the vector scaling of class 0, 1, 2" in caplog.text
    assert scaled.isfinite().all()
    assert (scaled.argmax(1) == targets).all()
    assert functional.cross_entropy(scaled, targets) < 1e-5


def test_of_many_undetermined_classes_a_few_are_named(caplog: pytest.LogCaptureFixture):
    targets = torch.arange(120) % 12
    with caplog.at_level(logging.WARNING):
        fit_vector(50.0 * functional.one_hot(targets, 12), targets)
    assert "scaling of class 0, 1, 2, 3, 4 and 7 more: near" in caplog.text


def test_nothing_is_logged_where_the_data_decide(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        fit_vector(*skewed_case(4))
    assert caplog.text == ""


def test_bad_input_of_vector_scaling_is_named():
    fitted = VectorScaling(weight=torch.ones(3).double(), bias=torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"logits have shape \(2, 4\): fitted on \[N, 3\]"):
        fitted.apply(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"targets\[1\] = 2: must lie in 0\.\.1"):
        fit_vector(torch.zeros(2, 2), torch.tensor([0, 2]))


def bold_case(seed: int = 0, samples: int = 300, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Logits that are far too sure of themselves."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (samples,), generator=rng)
    clean = 2 * functional.one_hot(targets, classes)
    return 3 * (clean + 1.5 * torch.randn(samples, classes, generator=rng)), targets


def test_isotonic_of_two_classes_by_hand():
    # Class 0 at p = 0.2, 0.4, 0.6, 0.8 is 0, 1, 0, 1: the middle two are pooled to 1/2.
    p = torch.tensor([0.2, 0.4, 0.6, 0.8]).double()
    logits = torch.stack([p, 1 - p], dim=1).log()
    fitted = fit_isotonic(logits, torch.tensor([1, 0, 1, 0]))
    got = fitted.apply(logits).exp()
    low = (1 / 8) / (1 + 1 / 8)  # 0 is raised to 1 / (4 * 2), beside 1
    expected = torch.tensor([low, 0.5, 0.5, 1 - low]).double()
    torch.testing.assert_close(got, torch.stack([expected, 1 - expected], dim=1))
    # Between knots it is a line: 0 .. 1/2 from 0.2 to 0.4, and level outside.
    p = torch.tensor([0.01, 0.3, 0.99]).double()
    got = fitted.apply(torch.stack([p, 1 - p], dim=1).log()).exp()
    torch.testing.assert_close(got[:, 0], torch.tensor([low, 0.25, 1 - low]).double())


@pytest.mark.parametrize("seed", [0, 1])
def test_isotonic_equals_scipy_at_the_fitted_points(seed: int):
    logits, targets = bold_case(seed)
    p = logits.double().softmax(1).numpy()
    columns = []
    for k in range(4):
        order = np.argsort(p[:, k], kind="stable")
        column = np.empty(len(p))
        column[order] = isotonic_regression((targets.numpy() == k)[order].astype(float)).x
        columns.append(np.maximum(column, 1 / (300 * 4)))
    expected = np.stack(columns, axis=1)
    expected /= expected.sum(1, keepdims=True)
    got = fit_isotonic(logits, targets).apply(logits)
    torch.testing.assert_close(got.exp(), torch.from_numpy(expected), rtol=1e-9, atol=0)


def test_isotonic_calibrates_other_data():
    fitted = fit_isotonic(*bold_case(2, samples=2000))
    logits, targets = bold_case(3, samples=2000)
    before, after = (calibration_metrics(z, targets) for z in (logits, fitted.apply(logits)))
    assert after.ece < before.ece / 3
    assert after.nll < before.nll
    assert after.accuracy > before.accuracy - 0.02


def test_isotonic_rows_sum_to_one_and_zeros_are_finite():
    # Class 2 has no image, so that its map is 0 throughout and raised to 1 / (N K).
    logits, targets = bold_case(4)
    present = targets != 2
    fitted = fit_isotonic(logits[present], targets[present])
    got = fitted.apply(logits)
    torch.testing.assert_close(got.exp().sum(1), torch.ones(300).double())
    assert fitted.floor == 1 / (present.sum() * 4)
    assert got.isfinite().all()
    assert (got[:, 2] == got.min(1).values).all()


def test_a_row_of_zeros_becomes_uniform():
    step = (np.array([0.5, 0.9]), np.array([0.0, 1.0]))
    got = Isotonic((step, step, step), floor=1e-4).apply(torch.tensor([[0.0, 0.1, 0.2]]))
    torch.testing.assert_close(got, torch.full((1, 3), -math.log(3)).double())


def test_bad_input_of_isotonic_is_named():
    logits, targets = bold_case(6, samples=20)
    with pytest.raises(ValueError, match=r"logits have shape \(4,\): fitted on \[N, 4\]"):
        fit_isotonic(logits, targets).apply(logits[0])
    with pytest.raises(ValueError, match=r"logits have 0 rows"):
        fit_isotonic(logits[:0], targets[:0])
