"""Bootstrap intervals: against a plain loop, against textbook widths, decided by the seed."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from semix.calib.metrics import bootstrap_intervals, calibration_metrics
from semix.calib.metrics.bootstrap import INTERVALS, resampled
from semix.calib.metrics.one_pass import read_predictions, validated_inputs


def random_case(seed: int, samples: int, levels: int = 10_000) -> tuple[Tensor, Tensor]:
    """Float64 logits of 2 `levels` different values, and targets that follow them in part."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (samples, 3), generator=rng).double() / levels * 4
    targets = torch.multinomial((logits / 2).softmax(1), 1, generator=rng)[:, 0]
    return logits, targets


@pytest.mark.parametrize("levels", [2, 10_000])  # two: runs of equal confidences, cut by bins
@pytest.mark.parametrize("samples", [7, 203])
def test_intervals_equal_the_plain_loop(samples: int, levels: int):
    logits, targets = random_case(1, samples, levels)
    got = bootstrap_intervals(logits, targets, bins=10, resamples=40, seed=5)
    rng = np.random.default_rng(5)
    all_metrics = [
        calibration_metrics(logits[rows], targets[rows], bins=10).as_dict()
        for rows in torch.from_numpy(rng.integers(samples, size=(40, samples)))
    ]
    for name in INTERVALS:
        expected = np.quantile([metrics[name] for metrics in all_metrics], [0.025, 0.975])
        assert got[name] == pytest.approx(tuple(expected), abs=1e-12), name


def test_a_resample_draws_the_same_images_whatever_was_predicted_of_them():
    logits, targets = random_case(4, 30)
    cooler = logits * torch.linspace(0.2, 3, 30)[:, None]  # another order, the same predictions
    one, other = (
        resampled(read_predictions(*validated_inputs(z, targets), 10), 10, resamples=5, seed=0)
        for z in (logits, cooler)
    )
    assert one[:, 0].tolist() == pytest.approx(other[:, 0].tolist(), abs=1e-12)  # accuracy
    assert one[:, 1].tolist() != pytest.approx(other[:, 1].tolist(), abs=1e-3)


def test_the_width_for_accuracy_is_that_of_the_textbook():
    logits, targets = random_case(2, 2000)
    low, high = bootstrap_intervals(logits, targets, resamples=2000)["accuracy"]
    accuracy = calibration_metrics(logits, targets).accuracy
    half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / 2000)
    assert low == pytest.approx(accuracy - half, abs=0.1 * half)
    assert high == pytest.approx(accuracy + half, abs=0.1 * half)


def test_the_seed_decides(monkeypatch: pytest.MonkeyPatch):
    logits, targets = random_case(3, 50)
    first = bootstrap_intervals(logits, targets, resamples=30)
    assert bootstrap_intervals(logits, targets, resamples=30) == first
    assert bootstrap_intervals(logits, targets, resamples=30, seed=1) != first
    # The draws do not depend on how many of them fit into memory at once.
    monkeypatch.setattr("semix.calib.metrics.bootstrap.BLOCK_INDICES", 200)
    chunked = bootstrap_intervals(logits, targets, resamples=30)
    assert chunked == {name: pytest.approx(interval) for name, interval in first.items()}


def test_no_resamples_are_refused():
    with pytest.raises(ValueError, match=r"resamples = 0: give a whole number of at least 1"):
        bootstrap_intervals(torch.zeros(2, 2), torch.tensor([0, 1]), resamples=0)
