"""Pairs weighted by what a run's classifiers say of the images it set aside."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch

from semix.calib.classifier import load_classifier
from semix.calib.pair_weights import calibration_gaps, soft_confusion, weigh_pairs
from semix.calib.run_folder import stored_settings
from semix.calib.train import train_run
from semix.data.errors import InputError
from semix.data.real import DIGITS, load_real
from semix.data.splits import RealDataConfig

NAMES = list(map(str, range(3)))
PROBABILITIES = torch.tensor(
    [[0.8, 0.2, 0.0], [0.6, 0.2, 0.2], [0.5, 0.5, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]]
)
TARGETS = torch.tensor([0, 0, 1, 1, 2])


def test_soft_confusion_is_the_mean_probability_of_the_other_class_both_ways():
    confusion = soft_confusion(PROBABILITIES, TARGETS)
    assert confusion[0, 1] == pytest.approx(((0.2 + 0.2) / 2 + (0.5 + 0.9) / 2) / 2)
    assert confusion[0, 2] == pytest.approx((0.1 + 0.0) / 2)
    assert torch.equal(confusion, confusion.T)


def test_a_calibration_gap_is_confidence_above_accuracy_within_the_pair():
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.0, 0.4], [0.8, 0.2, 0.0]])
    gaps = calibration_gaps(probabilities, torch.tensor([0, 2, 1]))
    # Pair 0, 1: confidence 0.9 right, 0.8 wrong. Pair 0, 2: 1.0 right, 0.6 wrong.
    assert gaps[0, 1] == pytest.approx((0.9 + 0.8) / 2 - 1 / 2)
    assert gaps[0, 2] == pytest.approx((1.0 + 0.6) / 2 - 1 / 2)
    assert gaps[1, 0] == gaps[0, 1] and gaps[0, 0] == 0


def test_images_set_aside_are_training_images_that_nobody_trains_on():
    whole = load_real(RealDataConfig(name="digits"))
    real = load_real(RealDataConfig(name="digits", set_aside_per_class=4))
    assert whole.set_aside is None
    assert np.bincount(real.set_aside.targets).tolist() == [4] * 10
    both = np.concatenate([real.train.images(), real.set_aside.images()])
    assert sorted(i.tobytes() for i in both) == sorted(i.tobytes() for i in whole.train.images())
    assert real.validation.digest == whole.validation.digest
    with pytest.raises(InputError, match=r"set_aside_per_class = 30: class 'zero' has 30 training"):
        load_real(RealDataConfig(name="digits", set_aside_per_class=30))


PLAIN = ("mixed=null", "head=null", "loss.name=ce", "seeds=[0, 1]", "evaluation.bootstrap=0")
ASIDE = (*PLAIN, "real.set_aside_per_class=4")


def test_a_run_weighs_pairs_by_the_images_it_set_aside(make_run):
    run = make_run("judge", *ASIDE)
    train_run(run)
    names = list(DIGITS)
    pairs = weigh_pairs(run, "confusion", class_names=names, device="cpu")
    assert (len(pairs.weights), pairs.images) == (45, 40)
    classifier = load_classifier(run, calibrator="plain")
    aside = load_real(stored_settings(run).real).set_aside
    expected = soft_confusion(
        classifier.probabilities(aside.images()), torch.from_numpy(aside.targets)
    )
    weights = [pairs.weights[i, j] for i, j in combinations(range(10), 2)]
    assert weights == pytest.approx([float(expected[i, j]) for i, j in combinations(range(10), 2)])
    assert pairs.digest == json.loads((run / "evaluation.json").read_text())["digest"]
    gaps = weigh_pairs(run, "calibration", class_names=names, device="cpu")
    assert min(gaps.weights.values()) >= 0 and gaps.weights != pairs.weights
    with pytest.raises(InputError, match=r"run = .*judge: has classes zero, .* these data others"):
        weigh_pairs(run, "confusion", class_names=names[::-1])
    data = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps(data | {"real": "of others"}))
    with pytest.raises(InputError, match=r"data\.json real = of others: its images changed"):
        weigh_pairs(run, "confusion", class_names=names)


def test_a_run_that_trained_on_all_of_its_images_judges_none(make_run):
    run = make_run("judge", *PLAIN)
    with pytest.raises(InputError, match=r"run = .*judge: seed 0 is not trained"):
        weigh_pairs(run, "confusion", class_names=DIGITS)
    train_run(run)
    with pytest.raises(InputError, match=r"set_aside_per_class = nothing: .* set aside, as 20"):
        weigh_pairs(run, "confusion", class_names=DIGITS)
