"""The measures of fixed logits beside those that other libraries gave for them."""

import json

import pytest
import torch

from calib.metrics import calibration_metrics, max_probability, ood_metrics
from calib.metrics.measures import smoothed_error, spectrum
from calib.metrics.one_pass import top_label
from tests.calib.metrics.oracle import CASES, FILE, case, foreign

FOUND = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CASES)
def test_measures_equal_those_of_other_libraries(name: str):
    seed, _, classes, _ = CASES[name]
    logits, targets = (torch.from_numpy(part) for part in case(*CASES[name]))
    got = calibration_metrics(logits, targets, FOUND["bins"]).as_dict()
    known, unknown = (
        max_probability(z) for z in (logits, torch.from_numpy(foreign(seed, classes)))
    )
    got |= ood_metrics(known, unknown).as_dict()
    confidence, correct = top_label(logits, targets)
    got["smoothed at 0.05"] = smoothed_error(spectrum(confidence, correct), 0.05)
    # They take the trapezoid over k/N from 1/N on: the first and the last risk count by half.
    ends = (1 - correct[confidence.argmax()].item()) + (1 - got["accuracy"])
    got["trapezoid_aurc"] = (got["aurc"] * len(targets) - ends / 2) / (len(targets) - 1)
    assert len(FOUND["cases"][name]) >= 8
    for measure, value in FOUND["cases"][name].items():
        assert got[measure.split(" ", 1)[1]] == pytest.approx(value, abs=1e-6), measure
