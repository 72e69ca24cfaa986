"""MDCA against hand-computed cases and its formula."""

import math

import numpy as np
import pytest
import torch

from calib.losses import build_loss
from data.errors import InputError
from tests.calib.losses.formulas import batch
from tests.calib.losses.whole_batch import assert_agrees, probabilities


def test_by_hand():
    logits = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]).log()
    # Mean probabilities 0.4, 0.5, 0.1; shares of the classes 0.5, 0, 0.5.
    got = build_loss("mdca", 3, weight=6.0)(logits, torch.tensor([0, 2]))
    cross_entropy = -(math.log(0.7) + math.log(0.1)) / 2
    torch.testing.assert_close(got, torch.tensor(cross_entropy + 6 * (0.1 + 0.5 + 0.4) / 3))


@pytest.mark.parametrize(("base", "gamma"), [("ce", 0.0), ("focal", 1.0), ("focal", 2.5)])
def test_agrees_with_its_formula(base: str, gamma: float):
    logits, targets = batch(samples=6, classes=4)

    def formula(z: np.ndarray) -> float:
        p, n = probabilities(z), len(z)
        total = 0.0
        for row, y in zip(p, targets.tolist(), strict=True):
            total -= (1 - row[y]) ** gamma * math.log(row[y]) / n
        for k in range(4):
            share = sum(y == k for y in targets.tolist()) / n
            total += 1.5 * abs(sum(row[k] for row in p) / n - share) / 4
        return total

    assert_agrees(
        build_loss("mdca", 4, weight=1.5, base=base, gamma=gamma), formula, logits, targets
    )


def test_a_batch_of_one_is_the_distance_from_its_class():
    logits = torch.tensor([[0.7, 0.2, 0.1]]).log()
    got = build_loss("mdca", 3)(logits, torch.tensor([0]))
    torch.testing.assert_close(got, torch.tensor(-math.log(0.7) + 0.6 / 3))


def test_bad_settings_are_named():
    with pytest.raises(InputError, match=r"loss\.base = ls: choose one of ce, focal"):
        build_loss("mdca", 3, base="ls")
    with pytest.raises(InputError, match=r"loss\.weight = -1: must be 0 or more"):
        build_loss("mdca", 3, weight=-1)
    with pytest.raises(InputError, match=r"loss\.gamma = -1: must be 0 or more"):
        build_loss("mdca", 3, gamma=-1)
