"""Calibration measures: values worked out by hand, an independent authority, properties."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, MulticlassCalibrationError

from calib.metrics import (
    calibration_metrics,
    max_probability,
    negative_entropy,
    ood_metrics,
    overconfidence_error,
    reliability_bins,
    underconfidence_error,
)
from calib.metrics.measures import expected_error, maximum_error
from calib.metrics.one_pass import equal_mass, equal_width


def logits_of(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def random_case(seed: int, samples: int = 500, classes: int = 4) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, classes, generator=rng)
    return logits, torch.randint(classes, (samples,), generator=rng)


def test_four_samples_by_hand():
    logits = logits_of([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    targets = torch.tensor([0, 1, 0, 0])  # right, wrong, right, wrong
    got = calibration_metrics(logits, targets, bins=2)
    # One bin (0.5, 1] holds all: confidence 0.75, accuracy 0.5.
    assert got.accuracy == pytest.approx(0.5)
    assert got.ece == pytest.approx(0.25)
    assert got.mce == pytest.approx(0.25)
    assert got.over_ece == pytest.approx(0.25)
    assert got.under_ece == 0
    # Equal size: {0.6 wrong, 0.7 right} gap 0.15, {0.8 wrong, 0.9 right} gap 0.35.
    assert got.adaptive_ece == pytest.approx((0.15 + 0.35) / 2)
    # Class 0: (0, 0.5] holds 0.4, true: 0.6; (0.5, 1] holds 0.9 0.8 0.7, two of three true.
    # Class 1: (0, 0.5] holds 0.1 0.2 0.3, one of three true; (0.5, 1] holds 0.6, false.
    class0 = 0.25 * 0.6 + 0.75 * abs(0.8 - 2 / 3)
    class1 = 0.75 * abs(0.2 - 1 / 3) + 0.25 * 0.6
    assert got.classwise_ece == pytest.approx((class0 + class1) / 2)
    assert got.nll == pytest.approx(-math.log(0.9 * 0.2 * 0.7 * 0.4) / 4)
    assert got.brier == pytest.approx(2 * (0.1**2 + 0.8**2 + 0.3**2 + 0.6**2) / 4)


def test_over_and_under_are_two_parts():
    # (0.75, 1]: 0.9 wrong, gap +0.9. (0.5, 0.75]: 0.7 and 0.6 right, gap -0.35.
    logits = logits_of([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]])
    got = calibration_metrics(logits, torch.tensor([1, 0, 0]), bins=4)
    assert got.over_ece == pytest.approx(0.9 / 3)
    assert got.under_ece == pytest.approx(0.7 / 3)
    assert got.mce == pytest.approx(0.9)


def test_mce_is_the_widest_bin_and_ece_the_weighted_mean():
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.55], dtype=torch.float64)
    correct = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    bins = equal_width(confidence, correct, 10)
    assert maximum_error(bins) == pytest.approx(0.55)
    assert expected_error(bins) == pytest.approx(0.75 * 0.05 + 0.25 * 0.55)


@pytest.mark.parametrize("bins", [2, 5, 7, 10, 15, 25])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(bins: int):
    edges = torch.tensor([m / bins for m in range(1, bins + 1)], dtype=torch.float64)
    got = equal_width(edges, torch.ones(bins).double(), bins)
    assert got.count.tolist() == [1] * bins
    torch.testing.assert_close(got.confidence, edges)


def test_edges_reached_through_softmax():
    half = reliability_bins(torch.zeros(1, 2), torch.tensor([0]), bins=10)
    assert half.count.nonzero().tolist() == [[4]]  # 0.5 lies in (0.4, 0.5]
    sure = reliability_bins(torch.tensor([[1000.0, 0.0]]), torch.tensor([1]), bins=10)
    assert sure.count.nonzero().tolist() == [[9]]
    assert sure.confidence[9] == 1
    assert sure.accuracy[9] == 0
    assert calibration_metrics(torch.tensor([[1000.0, 0.0]]), torch.tensor([1])).ece == 1


def test_reliability_bins_by_hand():
    logits = logits_of([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]])
    got = reliability_bins(logits, torch.tensor([0, 1, 0]), bins=4)
    assert got.count.tolist() == [0, 0, 1, 2]
    expected = torch.tensor([0, 0, 0.6, 0.85], dtype=torch.float64)
    torch.testing.assert_close(got.confidence, expected)
    torch.testing.assert_close(got.accuracy, torch.tensor([0, 0, 1.0, 0.5], dtype=torch.float64))


def test_adaptive_ece_equals_the_plain_loop():
    logits, targets = random_case(1, samples=503)
    confidence, predicted = logits.double().softmax(1).max(1)
    order = np.argsort(confidence.numpy())
    expected = 0.0
    for part in np.array_split(order, 15):
        gap = confidence.numpy()[part].mean() - (predicted == targets).numpy()[part].mean()
        expected += len(part) / 503 * abs(gap)
    assert calibration_metrics(logits, targets).adaptive_ece == pytest.approx(expected)


def test_adaptive_ece_of_equal_confidences_does_not_depend_on_order():
    confidence = torch.full((30,), 0.8, dtype=torch.float64)
    correct = torch.arange(30).lt(18).double()  # the first 18 are right: accuracy 0.6
    for order in (torch.arange(30), torch.arange(30).flip(0)):
        error = expected_error(equal_mass(confidence, correct[order], 15))
        assert error == pytest.approx(0.2)


@pytest.mark.parametrize("levels", [7, 10_000])  # seven logits: many equal confidences
def test_adaptive_ece_in_the_variant_of_the_official_code(levels: int):
    rng = torch.Generator().manual_seed(6)
    logits = torch.randint(levels, (400, 3), generator=rng) / levels * 6
    targets = torch.randint(3, (400,), generator=rng)
    confidence, predicted = logits.softmax(1).max(1)
    edges = np.interp(np.linspace(0, 400, 16), np.arange(400), np.sort(confidence.numpy()))
    expected = 0.0
    for low, high in itertools.pairwise(edges.tolist()):
        inside = confidence.gt(low) & confidence.le(high)
        if inside.any():
            accuracy = (predicted == targets)[inside].double().mean()
            gap = (confidence[inside].double().mean() - accuracy).abs()
            expected += (inside.double().mean() * gap).item()
    got = calibration_metrics(logits, targets, adaptive="code").adaptive_ece
    assert got == pytest.approx(expected, abs=1e-6)


def test_the_official_variant_leaves_out_the_lowest_confidence():
    confidence = torch.tensor([0.5, 0.7, 0.9], dtype=torch.float64)
    bins = equal_mass(confidence, torch.zeros(3).double(), 1, variant="code")
    assert (bins.count.tolist(), bins.share.tolist()) == ([2], [pytest.approx(2 / 3)])
    same = equal_mass(torch.full((9,), 0.8).double(), torch.ones(9).double(), 15, variant="code")
    assert expected_error(same) == 0


def test_adaptive_ece_with_fewer_samples_than_bins():
    got = calibration_metrics(logits_of([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    assert got.adaptive_ece == pytest.approx((0.1 + 0.6) / 2)


def test_classwise_ece_counts_a_class_without_targets():
    logits = logits_of([[0.7, 0.2, 0.1]])
    got = calibration_metrics(logits, torch.tensor([0]), 10).classwise_ece
    assert got == pytest.approx((0.3 + 0.2 + 0.1) / 3)


@pytest.mark.parametrize("bins", [1, 2, 15])
@pytest.mark.parametrize("classes", [2, 7, 300])
def test_classwise_ece_equals_the_loop_over_classes_and_bins(classes: int, bins: int):
    logits, targets = random_case(4, samples=700, classes=classes)
    probabilities = logits.double().softmax(1)
    edges, total = torch.linspace(0, 1, bins + 1, dtype=torch.float64), 0.0
    for k in range(classes):
        p, is_k = probabilities[:, k], (targets == k).double()
        for low, high in itertools.pairwise(edges):
            inside = (p > low) & (p <= high)
            if inside.any():
                gap = (p[inside].mean() - is_k[inside].mean()).abs()
                total += inside.double().mean().item() * gap.item()
    got = calibration_metrics(logits.double(), targets, bins).classwise_ece
    assert got == pytest.approx(total / classes, abs=1e-12)
    assert calibration_metrics(logits, targets, bins).classwise_ece == pytest.approx(got, abs=1e-7)


@pytest.mark.parametrize("bins", [10, 15])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ece_and_mce_equal_torchmetrics(bins: int, seed: int):
    # Random confidences lie on no edge, where its bins [l, u) would differ from ours.
    logits, targets = random_case(seed)
    got = calibration_metrics(logits, targets, bins=bins)
    for norm, mine in (("l1", got.ece), ("max", got.mce)):
        peer = MulticlassCalibrationError(num_classes=4, n_bins=bins, norm=norm)
        assert mine == pytest.approx(peer(logits.softmax(1), targets).item(), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    samples=st.integers(1, 60),
    classes=st.integers(2, 6),
    bins=st.integers(1, 20),
    levels=st.sampled_from([1, 3, 1000]),  # few levels give many equal confidences
)
def test_properties(seed: int, samples: int, classes: int, bins: int, levels: int):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels + 1, (samples, classes), generator=rng) / levels * 4
    targets = torch.randint(classes, (samples,), generator=rng)
    got = calibration_metrics(logits, targets, bins=bins)
    assert got.over_ece + got.under_ece == pytest.approx(got.ece, abs=1e-12)
    assert got.ece <= got.mce + 1e-12
    assert got.ece >= abs(got.over_ece - got.under_ece) - 1e-12
    limits = {"nll": math.inf, "brier": 2, "brier_reliability": 2, "brier_within": 2}
    for name, value in got.as_dict().items():
        low = -2 if name == "brier_within" else -1e-12
        assert low <= value <= limits.get(name, 1 + 1e-12), name
    parts = got.brier_reliability - got.brier_resolution + got.brier_uncertainty + got.brier_within
    assert parts == pytest.approx(got.brier, abs=1e-12)
    # A kernel only smooths: never below the gap of the means, never above the gaps added up.
    assert got.smooth_ece >= abs(got.over_ece - got.under_ece) - 1e-6
    order = torch.randperm(samples, generator=rng)
    shuffled = calibration_metrics(logits[order], targets[order], bins=bins)
    assert shuffled.as_dict() == pytest.approx(got.as_dict(), abs=1e-12)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_measured_in_single(kind: torch.dtype):
    logits, targets = random_case(3)
    got = calibration_metrics(logits.to(kind), targets)
    assert got == calibration_metrics(logits.to(kind).float(), targets)


def test_single_precision_logits_give_the_measures_of_double():
    logits, targets = random_case(5, samples=3000, classes=200)  # in more than one part
    got, exact = (calibration_metrics(z, targets).as_dict() for z in (logits, logits.double()))
    assert got == pytest.approx(exact, abs=3e-7)


def test_the_surest_predictions_are_told_apart_in_single_precision():
    # The right one is the surer of the two by 1e-9 against 1e-13: errors come last.
    logits = torch.tensor([[30.0, 0.0], [20.0, 0.0]])
    assert calibration_metrics(logits, torch.tensor([0, 1])).aurc == pytest.approx(0.25)
    assert calibration_metrics(logits, torch.tensor([0, 0])).nll == pytest.approx(
        (math.exp(-30) + math.exp(-20)) / 2, rel=1e-6
    )


def test_a_single_precision_confidence_on_an_edge_belongs_to_the_bin_below():
    logits = torch.tensor([[0.6, 0.4], [0.8, 0.2]]).log()
    assert reliability_bins(logits, torch.tensor([0, 0]), bins=5).count.tolist() == [0, 0, 1, 1, 0]


def test_of_equal_logits_the_first_class_is_predicted():
    got = calibration_metrics(torch.zeros(3, 4), torch.tensor([0, 1, 3]))
    assert got.accuracy == pytest.approx(1 / 3)


def test_overconfidence_error_by_hand():
    # (0.75, 1]: 0.9 wrong, gap 0.9. (0.5, 0.75]: 0.7 and 0.6 right, gap -0.35 at 0.65.
    logits = logits_of([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]])
    bins = reliability_bins(logits, torch.tensor([1, 0, 0]), bins=4)
    assert overconfidence_error(bins) == pytest.approx(0.9 * 0.9 / 3)
    assert underconfidence_error(bins) == pytest.approx(0.65 * 0.7 / 3)


@pytest.mark.parametrize(
    ("logits", "targets", "text"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), r"logits have 0 rows"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), r"logits are torch\.float32 \(3,\)"),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), r"\(3, 1\).*K >= 2"),
        (torch.zeros(3, 2).long(), torch.zeros(3, dtype=torch.long), r"logits are torch\.int64"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), r"shape \(2,\): give \[3\]"),
        (torch.zeros(3, 2), torch.zeros(3), r"targets are torch\.float32: give class numbers"),
        (torch.tensor([[0, 0], [0, math.nan]]), torch.tensor([0, 0]), r"logits\[1, 1\] = nan"),
        (torch.tensor([[0, 0], [math.inf, 0]]), torch.tensor([0, 0]), r"logits\[1, 0\] = inf"),
        (torch.zeros(2, 2), torch.tensor([0, 2]), r"targets\[1\] = 2: must lie in 0\.\.1"),
        (torch.zeros(2, 2), torch.tensor([0, -1]), r"targets\[1\] = -1: must lie in 0\.\.1"),
    ],
)
def test_bad_input_is_named(logits: Tensor, targets: Tensor, text: str):
    with pytest.raises(ValueError, match=text):
        calibration_metrics(logits, targets)
    with pytest.raises(ValueError, match=text):
        reliability_bins(logits, targets)


def test_bins_must_be_positive():
    with pytest.raises(ValueError, match=r"bins = 0: give a whole number of at least 1"):
        calibration_metrics(torch.zeros(2, 2), torch.tensor([0, 1]), bins=0)


def test_separable_scores():
    got = ood_metrics(torch.linspace(0.6, 1, 40), torch.linspace(0, 0.5, 30))
    assert got.as_dict() == {"auroc": 1.0, "fpr95": 0.0}


def test_ood_by_hand():
    # Of 100 known scores 1..100, 95 are at least 6; of the foreign ones 6 and 50 pass.
    got = ood_metrics(torch.arange(1.0, 101.0), torch.tensor([5.5, 6.0, 50.0]))
    assert got.fpr95 == pytest.approx(2 / 3)
    # Known above 5.5: 95; above 6: 94 and a tie; above 50: 50 and a tie.
    assert got.auroc == pytest.approx((95 + 94.5 + 50.5) / 300)


def test_auroc_equals_torchmetrics():
    rng = torch.Generator().manual_seed(0)
    known = torch.randint(0, 40, (300,), generator=rng) / 40
    foreign = torch.randint(-10, 30, (200,), generator=rng) / 40
    labels = torch.cat([torch.ones(300), torch.zeros(200)]).long()
    scores = torch.cat([known, foreign])
    peer = BinaryAUROC()((scores - scores.min()) / 2, labels).item()
    assert ood_metrics(known, foreign).auroc == pytest.approx(peer, abs=1e-6)


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
