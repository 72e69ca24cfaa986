"""One pass over logits: which bin a value is in, precisions, and input that is refused."""

import math

import pytest
import torch
from torch import Tensor

from semix.calib.metrics import (
    calibration_metrics,
    reliability_bins,
)
from semix.calib.metrics.one_pass import bin_of, equal_width, inner_edges
from tests.calib.metrics.test_measures import logits_of, random_case


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


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_measured_in_single(kind: torch.dtype):
    logits, targets = random_case(3)
    got = calibration_metrics(logits.to(kind), targets)
    assert got == calibration_metrics(logits.to(kind).float(), targets)


def test_single_precision_logits_give_the_measures_of_double():
    logits, targets = random_case(5, samples=3000, classes=200)  # in more than one chunk
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


@pytest.mark.parametrize("bins", [1, 15, 33, 34, 100])
def test_a_value_on_an_edge_is_in_the_bin_below(bins):
    edges = inner_edges(bins, torch.float32)
    values = torch.cat([torch.tensor([0.0, 1.0]), edges, torch.rand(500)])
    expected = [sum(value > edge for edge in edges.tolist()) for value in values.tolist()]
    assert bin_of(values, edges).tolist() == expected
