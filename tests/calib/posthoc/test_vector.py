"""Vector scaling: the minimum of the NLL, and finite where there is none."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional

from calib.posthoc import VectorScaling, fit_temperature, fit_vector


def noisy_case(seed: int = 0, samples: int = 400, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Float64 logits, right more often than not; each class has its own scale and offset."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (samples,), generator=rng)
    clean = 3 * functional.one_hot(targets, classes)
    noise = 1.5 * torch.randn(samples, classes, generator=rng).double()
    place = torch.arange(classes) / classes
    return (clean + noise) * (1 + place) + 2 * place, targets


def nll_and_slope(x: np.ndarray, logits: Tensor, targets: Tensor) -> tuple[float, np.ndarray]:
    """NLL of softmax(w z + b) for x = (w, b), and its derivative, written out."""
    z, n = logits.numpy(), len(logits)
    w, b = x.reshape(2, -1)
    scores = z * w + b
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rest = p.copy()
    rest[np.arange(n), targets] -= 1
    nll = -np.log(p[np.arange(n), targets]).mean()
    return nll, np.concatenate([(rest * z).mean(0), rest.mean(0)])


def test_one_constant_logit_leaves_the_class_frequencies():
    # Whatever w, each row is b up to a shift; 2, 1 and 1 of four images: p = 1/2, 1/4, 1/4.
    fitted = fit_vector(torch.full((4, 3), 2.0), torch.tensor([0, 0, 1, 2]))
    p = fitted.apply(torch.full((1, 3), 2.0)).softmax(1)
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.25, 0.25]]).double(), atol=1e-7, rtol=0)


def test_two_classes_by_hand():
    # Logit 0 is 0 or 3, logit 1 always 0: logistic regression with log odds b and 3 w + b,
    # from 1 of 4 and 3 of 4 images of class 0.
    logits = torch.tensor([[0.0, 0.0]] * 4 + [[3.0, 0.0]] * 4)
    fitted = fit_vector(logits, torch.tensor([0, 1, 1, 1, 0, 0, 0, 1]))
    assert fitted.weight[0].item() == pytest.approx(2 * math.log(3) / 3, rel=1e-6)
    assert (fitted.bias[0] - fitted.bias[1]).item() == pytest.approx(-math.log(3), rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_scipy(seed: int):
    logits, targets = noisy_case(seed)
    start = np.repeat([1.0, 0.0], 5)
    found = minimize(
        nll_and_slope, start, (logits, targets), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    fitted = fit_vector(logits, targets)
    torch.testing.assert_close(fitted.weight, torch.from_numpy(found.x[:5]), atol=1e-5, rtol=0)
    bias = torch.from_numpy(found.x[5:])
    torch.testing.assert_close(fitted.bias, bias - bias.mean(), atol=1e-5, rtol=0)
    got, slope = nll_and_slope(
        np.concatenate([fitted.weight.numpy(), fitted.bias.numpy()]), logits, targets
    )
    assert got == pytest.approx(found.fun, abs=1e-12)
    assert np.abs(slope).max() < 1e-6
    temperature = fit_temperature(logits, targets)
    assert got < functional.cross_entropy(logits / temperature, targets).item() - 0.05


def test_recovers_what_the_logits_were_scaled_by():
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
    logits, targets = noisy_case(2)
    torch.testing.assert_close(
        fit_vector(scale * logits, targets).apply(scale * logits),
        fit_vector(logits, targets).apply(logits),
        rtol=1e-5,
        atol=1e-5,
    )


def test_an_absent_class_gets_a_low_finite_probability(caplog: pytest.LogCaptureFixture):
    logits, targets = noisy_case(3, samples=100)
    seen = targets != 3
    with caplog.at_level(logging.WARNING):
        fitted = fit_vector(logits[seen], targets[seen])
    assert "do not determine the vector scaling of class 3: kept near temperature" in caplog.text
    p = fitted.apply(logits).softmax(1)
    assert p[:, 3].min() > 0
    assert p[seen, 3].max() < 1e-3
    assert fitted.weight.abs().max() < 10


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_separable_data_stay_finite_and_right(scale: float, caplog: pytest.LogCaptureFixture):
    targets = torch.arange(30) % 3
    noise = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    logits = scale * (functional.one_hot(targets, 3) + 0.1 * noise)
    with caplog.at_level(logging.WARNING):
        scaled = fit_vector(logits, targets).apply(logits)
    assert "do not determine the vector scaling of class 0, 1, 2" in caplog.text
    assert scaled.isfinite().all()
    assert (scaled.argmax(1) == targets).all()
    assert functional.cross_entropy(scaled, targets) < 1e-5


def test_nothing_is_logged_where_the_data_decide(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        fit_vector(*noisy_case(4))
    assert caplog.text == ""


def test_survives_json():
    logits, targets = noisy_case(5, samples=50)
    fitted = fit_vector(logits, targets)
    again = VectorScaling.from_dict(json.loads(json.dumps(fitted.as_dict())))
    torch.testing.assert_close(again.apply(logits), fitted.apply(logits), rtol=0, atol=0)


def test_bad_input_is_named():
    fitted = VectorScaling(weight=torch.ones(3).double(), bias=torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"logits have shape \(2, 4\): fitted on \[N, 3\]"):
        fitted.apply(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"targets\[1\] = 2: must lie in 0\.\.1"):
        fit_vector(torch.zeros(2, 2), torch.tensor([0, 2]))
