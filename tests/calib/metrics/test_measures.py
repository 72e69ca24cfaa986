"""Calibration measures by hand, against plain loops and other libraries, and their properties."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics.classification import MulticlassCalibrationError

from semix.calib.metrics import (
    calibration_metrics,
    max_probability,
    ood_metrics,
    overconfidence_error,
    reliability_bins,
    underconfidence_error,
)
from semix.calib.metrics.conformal import (
    SCORES,
    ConformalSets,
    Score,
    measure_sets,
    nonconformity,
    sets_within,
    threshold,
)
from semix.calib.metrics.measures import (
    expected_error,
    maximum_error,
    smooth_error,
    smoothed_error,
    spectrum,
)
from semix.calib.metrics.one_pass import equal_mass, equal_width, top_label
from semix.calib.metrics.selective import selective
from semix.calib.metrics.variational import top_label_error, variational_error
from tests.calib.metrics.oracle import CASES, FILE, LIMITS, ORDERS, case, ood_logits


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


def test_adaptive_ece_equals_the_plain_loop():
    logits, targets = random_case(1, samples=503)
    confidence, predicted = logits.double().softmax(1).max(1)
    order = np.argsort(confidence.numpy())
    expected = 0.0
    for rows in np.array_split(order, 15):
        gap = confidence.numpy()[rows].mean() - (predicted == targets).numpy()[rows].mean()
        expected += len(rows) / 503 * abs(gap)
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
    assert (bins.count.tolist(), bins.fraction.tolist()) == ([2], [pytest.approx(2 / 3)])
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
    brier = got.brier_reliability - got.brier_resolution + got.brier_uncertainty + got.brier_within
    assert brier == pytest.approx(got.brier, abs=1e-12)
    # A kernel only smooths: never below the gap of the means, never above the gaps added up.
    assert got.smooth_ece >= abs(got.over_ece - got.under_ece) - 1e-6
    order = torch.randperm(samples, generator=rng)
    shuffled = calibration_metrics(logits[order], targets[order], bins=bins)
    assert shuffled.as_dict() == pytest.approx(got.as_dict(), abs=1e-12)


def test_overconfidence_error_by_hand():
    # (0.75, 1]: 0.9 wrong, gap 0.9. (0.5, 0.75]: 0.7 and 0.6 right, gap -0.35 at 0.65.
    logits = logits_of([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]])
    bins = reliability_bins(logits, torch.tensor([1, 0, 0]), bins=4)
    assert overconfidence_error(bins) == pytest.approx(0.9 * 0.9 / 3)
    assert underconfidence_error(bins) == pytest.approx(0.65 * 0.7 / 3)


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
    bin_index = np.ceil(p * bins).astype(int)
    reliability = resolution = within = 0.0
    for k in range(5):
        for b in range(1, bins + 1):
            inside = bin_index[:, k] == b
            if inside.any():
                q, o = p[inside, k], y[inside, k]
                fraction = inside.mean()
                reliability += fraction * (q.mean() - o.mean()) ** 2
                resolution += fraction * (o.mean() - y[:, k].mean()) ** 2
                within += fraction * (q.var() - 2 * ((q - q.mean()) * (o - o.mean())).mean())
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
        got = selective(confidence[order], correct[order])
        assert got.aurc == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)
        # 0, 1, 1, 2 errors of 4: three strips, the first 1/8, 1/4, 3/8 high.
        assert got.augrc == pytest.approx((1 / 8 + 1 / 4 + 3 / 8) / 3)
        assert got.coverage_at_5_risk == 1 / 4
        assert got.risk_at_80_coverage == 2 / 4


def test_aurc_of_equal_confidences_is_the_error_rate():
    correct = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    got = selective(torch.full((5,), 0.5).double(), correct)
    assert (got.aurc, got.risk_at_80_coverage) == pytest.approx((0.4, 0.4))
    assert got.coverage_at_5_risk == 0


def test_variational_ece_of_a_known_gap():
    # Right three times in ten where the confidence says six and eight.
    confidence = torch.tensor([0.6, 0.8]).double().repeat_interleave(500)
    correct = (torch.arange(1000) % 10 < 3).double()
    assert top_label_error(confidence, correct) == pytest.approx((0.3 + 0.5) / 2)
    assert top_label_error(confidence[:9], correct[:9]) == 0
    assert top_label_error(confidence, torch.ones(1000).double()) == pytest.approx(0.3)


def wavy_case(seed: int, samples: int = 300) -> tuple[Tensor, Tensor]:
    """Confidences up to 1 that are right too often below 0.7 and too seldom above."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(3, 1.2, samples)
    confidence[:9] = 1.0
    chance = np.where(confidence < 0.7, confidence + 0.2, confidence - 0.25)
    return torch.from_numpy(confidence), torch.from_numpy((rng.random(samples) < chance) + 0.0)


def error_by_definition(
    confidence: Tensor, correct: Tensor, width: float, points: int = 20_001
) -> float:
    """Smooth ECE by definition: Gaussians around samples and their mirror images, integrated."""
    t, c = np.linspace(0, 1, points)[:, None], confidence.numpy()
    heights = sum(
        np.exp(-(((t - (2 * turn + side * c)) / width) ** 2) / 2)
        for turn in range(-3, 4)
        for side in (-1, 1)
    ) / (width * np.sqrt(2 * np.pi))
    smoothed = heights @ (confidence - correct).numpy() / len(c)
    return float(np.trapezoid(np.abs(smoothed), dx=1 / (points - 1)))


@pytest.mark.parametrize("value", [0.3, 0.61803, 1.0])
def test_smooth_ece_of_one_confidence_is_the_gap(value: float):
    confidence = torch.full((8,), value, dtype=torch.float64)
    correct = torch.arange(8).lt(2).double()
    assert smooth_error(confidence, correct) == pytest.approx(abs(value - 0.25), abs=1e-8)


@pytest.mark.parametrize("width", [0.01, 0.08, 0.7])
def test_one_bandwidth_equals_the_kernel_written_out(width: float):
    confidence, correct = wavy_case(0, samples=60)
    got = smoothed_error(spectrum(confidence, correct), width)
    assert got == pytest.approx(error_by_definition(confidence, correct, width), abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_smooth_ece_is_its_own_bandwidth(seed: int):
    confidence, correct = wavy_case(seed, samples=60)
    error = smooth_error(confidence, correct)
    assert 0.02 < error < 0.3
    assert error_by_definition(confidence, correct, error) == pytest.approx(error, abs=1e-6)


def test_gaps_of_both_signs_side_by_side_partly_cancel():
    # 0.6 always right and 0.64 always wrong: bins would give 0.4 and 0.64; the kernel sees them
    # together, and is at least as wide as what is left of them.
    confidence = torch.tensor([0.6, 0.64]).double().repeat(50)
    correct = torch.tensor([1.0, 0.0]).double().repeat(50)
    error = smooth_error(confidence, correct)
    assert 0.12 < error < 0.2
    assert error == pytest.approx(error_by_definition(confidence, correct, error), abs=1e-6)


def test_smooth_ece_of_perfect_confidence_is_none():
    ones = torch.ones(5, dtype=torch.float64)
    assert smooth_error(ones, ones) == pytest.approx(0, abs=1e-9)


ORACLE = json.loads(FILE.read_text())
Predicted = tuple[Tensor, Tensor]  # logits [N, K] and targets [N]


@pytest.mark.parametrize("name", CASES)
def test_conformal_sets_equal_those_of_torch_uncertainty(name: str):
    logits, targets = (torch.from_numpy(array) for array in case(*CASES[name]))
    for score in SCORES:
        scores = nonconformity(logits.double().softmax(1), score)
        members = sets_within(scores, LIMITS[score])
        coverage = members.gather(1, targets[:, None]).double().mean().item()
        size = members.sum(1).double().mean().item()
        assert [coverage, size] == pytest.approx(ORACLE["conformal"][name][score], abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_the_variational_error_equals_that_of_probmetrics(name: str):
    logits, targets = (torch.from_numpy(array) for array in case(*CASES[name]))
    p, other = logits.double().softmax(1), (logits.double() / 2).softmax(1)
    truth = one_hot(targets, logits.shape[1])
    for order in ORDERS:
        got = variational_error(p, other, truth, order)
        assert got == pytest.approx(ORACLE["variational"][name][str(order)], abs=1e-9)
        assert variational_error(p, p, truth, order) == 0


def conformal_sets(held_out: Predicted, test: Predicted, score: Score) -> ConformalSets:
    """Sets that may lack the true class of one image in ten, calibrated on the first images."""
    logits, targets = held_out
    limit = threshold(nonconformity(logits.double().softmax(1), score), targets, 0.1)
    return measure_sets(*test, score=score, limit=limit)


def test_conformal_sets_keep_their_promise_on_exchangeable_images():
    rng = torch.Generator().manual_seed(0)
    miss_rates = dict.fromkeys(SCORES, 0.0)
    for _ in range(200):
        logits = 2 * torch.randn(400, 5, generator=rng)
        targets = torch.multinomial((logits / 2).softmax(1), 1, generator=rng)[:, 0]
        held_out, test = (logits[:100], targets[:100]), (logits[100:], targets[100:])
        for score in SCORES:
            result = conformal_sets(held_out, test, score)
            miss_rates[score] += (1 - result.coverage) / 200
            assert 1 <= result.size <= 5
    assert max(miss_rates.values()) < 0.1 + 0.005


def test_too_few_held_out_images_give_whole_sets():
    logits, targets = torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    result = conformal_sets((logits, targets), (logits, targets), "thr")
    assert (result.coverage, result.size) == (1, 3)


@pytest.mark.parametrize("name", CASES)
def test_measures_equal_those_of_other_libraries(name: str):
    seed, _, classes, _ = CASES[name]
    logits, targets = (torch.from_numpy(array) for array in case(*CASES[name]))
    got = calibration_metrics(logits, targets, ORACLE["bins"]).as_dict()
    known, unknown = (
        max_probability(z) for z in (logits, torch.from_numpy(ood_logits(seed, classes)))
    )
    got |= ood_metrics(known, unknown).as_dict()
    confidence, correct = top_label(logits, targets)
    got["smoothed at 0.05"] = smoothed_error(spectrum(confidence, correct), 0.05)
    # The libraries take the trapezoid over k/N from 1/N on: the first and the last count half.
    ends = (1 - correct[confidence.argmax()].item()) + (1 - got["accuracy"])
    got["trapezoid_aurc"] = (got["aurc"] * len(targets) - ends / 2) / (len(targets) - 1)
    assert len(ORACLE["cases"][name]) >= 8
    for measure, value in ORACLE["cases"][name].items():
        assert got[measure.split(" ", 1)[1]] == pytest.approx(value, abs=1e-6), measure
