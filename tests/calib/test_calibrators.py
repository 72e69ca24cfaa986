"""Calibrators: by hand, against scipy and probmetrics, on known truth, finite, and stored."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import isotonic_regression, minimize
from torch import Tensor
from torch.nn import functional

from semix.calib.calibrators import CALIBRATORS
from semix.calib.calibrators.margin import fit_margin_scaling, margins, soft_error
from semix.calib.calibrators.probabilities import Isotonic, fit_ensemble, fit_isotonic
from semix.calib.calibrators.scaling import (
    VectorScaling,
    fit_sms,
    fit_svs,
    fit_vector,
    fit_with_mixed,
)
from semix.calib.metrics import calibration_metrics
from semix.calib.temperature import fit_temperature
from tests.calib.metrics.oracle import CASES, FILE, case


def noisy_five(seed: int, scale: float = 1.0, samples: int = 400) -> tuple[Tensor, Tensor]:
    """Logits that are right more often than chance."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(5, (samples,), generator=rng)
    clean = 2 * functional.one_hot(targets, 5)
    return scale * (clean + 1.5 * torch.randn(samples, 5, generator=rng)), targets


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
    p = fitted(torch.full((1, 3), 2.0)).softmax(1)
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
        fit_vector(scale * logits, targets)(scale * logits),
        fit_vector(logits, targets)(logits),
        rtol=1e-5,
        atol=1e-5,
    )


def test_an_absent_class_gets_a_low_finite_probability(caplog: pytest.LogCaptureFixture):
    logits, targets = skewed_case(3, samples=100)
    present = targets != 3
    with caplog.at_level(logging.WARNING):
        fitted = fit_vector(logits[present], targets[present])
    assert "do not determine the vector scaling of class 3: near temperature" in caplog.text
    p = fitted(logits).softmax(1)
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
        scaled = fit_vector(logits, targets)(logits)
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
        fitted(torch.zeros(2, 4))
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
    got = fitted(logits).exp()
    low = (1 / 8) / (1 + 1 / 8)  # 0 is raised to 1 / (4 * 2), beside 1
    expected = torch.tensor([low, 0.5, 0.5, 1 - low]).double()
    torch.testing.assert_close(got, torch.stack([expected, 1 - expected], dim=1))
    # Between knots it is a line: 0 .. 1/2 from 0.2 to 0.4, and level outside.
    p = torch.tensor([0.01, 0.3, 0.99]).double()
    got = fitted(torch.stack([p, 1 - p], dim=1).log()).exp()
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
    got = fit_isotonic(logits, targets)(logits)
    torch.testing.assert_close(got.exp(), torch.from_numpy(expected), rtol=1e-9, atol=0)


def test_isotonic_calibrates_other_data():
    fitted = fit_isotonic(*bold_case(2, samples=2000))
    logits, targets = bold_case(3, samples=2000)
    before, after = (calibration_metrics(z, targets) for z in (logits, fitted(logits)))
    assert after.ece < before.ece / 3
    assert after.nll < before.nll
    assert after.accuracy > before.accuracy - 0.02


def test_isotonic_rows_sum_to_one_and_zeros_are_finite():
    # Class 2 has no image, so that its map is 0 throughout and raised to 1 / (N K).
    logits, targets = bold_case(4)
    present = targets != 2
    fitted = fit_isotonic(logits[present], targets[present])
    got = fitted(logits)
    torch.testing.assert_close(got.exp().sum(1), torch.ones(300).double())
    assert fitted.floor == 1 / (present.sum() * 4)
    assert got.isfinite().all()
    assert (got[:, 2] == got.min(1).values).all()


def test_a_row_of_zeros_becomes_uniform():
    step = (torch.tensor([0.5, 0.9]).double(), torch.tensor([0.0, 1.0]).double())
    got = Isotonic((step, step, step), floor=1e-4)(torch.tensor([[0.0, 0.1, 0.2]]))
    torch.testing.assert_close(got, torch.full((1, 3), -math.log(3)).double())


def test_bad_input_of_isotonic_is_named():
    logits, targets = bold_case(6, samples=20)
    with pytest.raises(ValueError, match=r"logits have shape \(4,\): fitted on \[N, 4\]"):
        fit_isotonic(logits, targets)(logits[0])
    with pytest.raises(ValueError, match=r"logits have 0 rows"):
        fit_isotonic(logits[:0], targets[:0])


# Structured and ensemble scaling


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["svs", "sms", "ets"])
def test_it_calibrates_as_well_as_probmetrics_own(name: str, kind: str):
    """The tolerance is 1e-4, as probmetrics works in float32 and stops earlier."""
    logits, targets = (torch.from_numpy(array) for array in case(*CASES[name]))
    half = len(logits) // 2
    held_out = logits[:half], targets[:half]
    scaled = CALIBRATORS[kind].fit(*held_out, fit_temperature(*held_out))(logits[half:])
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
        name: functional.cross_entropy(fit(logits, targets)(logits), targets).item()
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
        scaled = fit(logits, targets)(torch.tensor([[5.0, 0, 0], [0, 0, 5.0]]))
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
    best = functional.cross_entropy(fitted(4 * logits), targets).item()
    for first in range(51):
        for second in range(51 - first):
            weights = torch.tensor([first, second, 50 - first - second]).double() / 50
            other = replace(fitted, weights=weights)(4 * logits)
            assert best <= functional.cross_entropy(other, targets).item() + 1e-12


def test_an_ensemble_weighs_chance_where_labels_are_noise():
    _, targets, _ = known_truth(2000, 3, seed=3)
    noisy = torch.where(torch.arange(2000) % 2 == 0, targets, torch.arange(2000) % 3)
    confident = 20 * functional.one_hot(targets, 3).double()
    ensemble = fit_ensemble(confident, noisy)
    assert sum(ensemble.weights) == pytest.approx(1) and min(ensemble.weights) >= 0
    scaled = ensemble(confident).exp()
    torch.testing.assert_close(scaled.sum(1), torch.ones(2000, dtype=torch.float64))
    assert scaled.max(1).values.mean() == pytest.approx(2 / 3, abs=0.02)


def test_logits_of_other_classes_are_refused_by_structured_scaling():
    logits, targets, _ = known_truth(50, 3, seed=4)
    with pytest.raises(ValueError, match=r"logits have shape \(2, 4\): fitted on \[N, 3\]"):
        fit_svs(logits, targets)(torch.zeros(2, 4))


ON_VALIDATION = [name for name, kind in CALIBRATORS.items() if not kind.with_mixed]


@pytest.mark.parametrize("name", ON_VALIDATION)
def test_a_calibrator_that_is_stored_gives_the_same_logits(name: str):
    (logits, targets), (others, _) = noisy_five(1), noisy_five(2)
    fitted = CALIBRATORS[name].fit(logits, targets, fit_temperature(logits, targets))
    state = json.loads(json.dumps(fitted.state()))
    assert torch.equal(CALIBRATORS[name].from_state(state)(others), fitted(others))


@pytest.mark.parametrize("name", ON_VALIDATION)
def test_a_known_temperature_changes_nothing_that_is_fitted(name: str):
    logits, targets = noisy_five(3)
    kind = CALIBRATORS[name]
    given = kind.fit(logits, targets, fit_temperature(logits, targets))
    assert given.state() == kind.fit(logits, targets, None).state()


@pytest.mark.parametrize("state", [{"temperature": 1.5, "extra": 2}, {}])
def test_the_state_of_another_calibrator_is_refused(state: dict):
    with pytest.raises(TypeError):
        CALIBRATORS["scaled"].from_state(state)


def test_the_smooth_error_of_one_confidence_is_its_gap():
    # All images are in all bins to the same degree, so that every bin has the same gap of 0.3.
    confidence, correct = torch.full((10,), 0.9).double(), torch.tensor([1.0, 0, 1, 0, 1] * 2)
    expected = math.hypot(0.3, 1e-3) - 1e-3
    assert soft_error(confidence, correct.double()).item() == pytest.approx(expected)
    exact = torch.tensor([1.0, 1, 1, 1, 0]).double()
    assert soft_error(torch.full((5,), 0.8).double(), exact).item() == pytest.approx(0, abs=1e-9)


def overconfident_by_margin(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of two classes, true up to a margin of 2 and three times too large beyond it."""
    rng = torch.Generator().manual_seed(seed)
    margin = 4 * torch.rand(20_000, generator=rng)
    wrong = torch.rand(20_000, generator=rng) < torch.sigmoid(-margin)
    shown = torch.where(margin > 2, 2 + 3 * (margin - 2), margin)
    return torch.stack([shown, torch.zeros_like(shown)], dim=1), wrong.long()


def test_smart_gives_each_margin_its_own_temperature():
    held_out, (logits, targets) = overconfident_by_margin(0), overconfident_by_margin(1)
    smart = fit_margin_scaling(*held_out)(logits)
    scaled = logits / fit_temperature(*held_out)
    errors = [calibration_metrics(each, targets).ece for each in (logits, scaled, smart)]
    assert errors[2] < 0.4 * min(errors[:2])
    assert torch.equal(smart.argmax(1), logits.argmax(1))
    shown, temperature = margins(logits), margins(logits) / margins(smart)
    assert temperature[(shown > 0.5) & (shown < 2)].mean() == pytest.approx(1, abs=0.1)
    assert temperature[shown > 6].mean() > 1.7  # 6 to 8 are 3.3 to 4


def test_a_temperature_of_hard_labels_is_that_of_their_classes():
    logits, targets = noisy_five(1, scale=3.0)
    one_hot = functional.one_hot(targets, 5).float()
    assert fit_with_mixed(logits, one_hot).temperature == pytest.approx(
        fit_temperature(logits, targets), rel=1e-6
    )


def test_soft_labels_of_mixed_images_raise_the_temperature():
    logits, targets = noisy_five(1, scale=3.0)
    labels = functional.one_hot(targets, 5).float()
    softer = fit_with_mixed(logits.repeat(2, 1), torch.cat([labels, 0.5 * labels + 0.1]))
    temperature = softer.temperature
    # The minimum, found without a gradient over all temperatures of a fine grid.
    both = torch.cat([labels, 0.5 * labels + 0.1])
    grid = [0.01 * step for step in range(50, 2000)]
    best = min(grid, key=lambda t: functional.cross_entropy(logits.repeat(2, 1) / t, both).item())
    assert temperature == pytest.approx(best, abs=0.011)
    assert temperature > fit_temperature(logits, targets)
    with pytest.raises(ValueError, match=r"shapes \(400, 5\) and \(400,\)"):
        fit_with_mixed(logits, targets)
